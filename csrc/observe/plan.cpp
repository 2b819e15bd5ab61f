#include <shardwise/plan.h>

#include <algorithm>
#include <iomanip>
#include <sstream>

namespace shardwise {
namespace {

using Row = std::vector<std::string>;

std::string megabytes(int64_t bytes) {
  std::ostringstream text;
  text << std::fixed << std::setprecision(2) << static_cast<double>(bytes) / 1e6;
  return text.str();
}

std::string quoted(const std::string& text) {
  std::ostringstream result;
  result << '"';
  for (const char c : text) {
    if (c == '"' || c == '\\') {
      result << '\\' << c;
    } else if (static_cast<unsigned char>(c) < 0x20) {
      result << "\\u" << std::hex << std::setfill('0') << std::setw(4) << static_cast<int>(c);
    } else {
      result << c;
    }
  }
  result << '"';
  return result.str();
}

/// The first column to the left, the others to the right.
std::string aligned(const std::vector<Row>& rows) {
  std::vector<size_t> widths(rows.front().size());
  for (const auto& row : rows) {
    for (size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], row[i].size());
  }
  std::ostringstream text;
  for (const auto& row : rows) {
    for (size_t i = 0; i < row.size(); ++i) {
      text << (i ? "  " : "") << (i ? std::right : std::left) << std::setw(static_cast<int>(widths[i])) << row[i];
    }
    text << "\n";
  }
  return text.str();
}

} // namespace

std::string Plan::table() const {
  std::vector<Row> rows{{"unit", "kind", "dtype", "parameters", "elements", "MB", "bucket MB"}};
  Group sum;
  for (const auto& unit : units) {
    for (const auto& group : unit.groups) {
      rows.push_back(
          {unit.name.empty() ? "(root)" : unit.name, unit.kind, group.dtype, std::to_string(group.parameters),
           std::to_string(group.elements), megabytes(group.bytes), megabytes(group.bucket_bytes)});
      sum.parameters += group.parameters;
      sum.elements += group.elements;
      sum.bytes += group.bytes;
      sum.bucket_bytes += group.bucket_bytes;
    }
  }
  rows.push_back(
      {"sum", "", "", std::to_string(sum.parameters), std::to_string(sum.elements), megabytes(sum.bytes),
       megabytes(sum.bucket_bytes)});
  return mesh + "\n" + aligned(rows);
}

std::string Plan::json() const {
  std::ostringstream text;
  text << "{\"mesh\": " << quoted(mesh) << ", \"units\": [";
  for (size_t i = 0; i < units.size(); ++i) {
    const auto& unit = units[i];
    text << (i ? ", " : "") << "{\"name\": " << quoted(unit.name) << ", \"kind\": " << quoted(unit.kind)
         << ", \"groups\": [";
    for (size_t k = 0; k < unit.groups.size(); ++k) {
      const auto& group = unit.groups[k];
      text << (k ? ", " : "") << "{\"dtype\": " << quoted(group.dtype) << ", \"device\": " << quoted(group.device)
           << ", \"parameters\": " << group.parameters << ", \"elements\": " << group.elements
           << ", \"bytes\": " << group.bytes << ", \"bucket_bytes\": " << group.bucket_bytes
           << ", \"shard_bytes\": " << group.shard_bytes << "}";
    }
    text << "]}";
  }
  text << "]}";
  return text.str();
}

} // namespace shardwise
