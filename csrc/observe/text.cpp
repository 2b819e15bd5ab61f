#include "observe/text.h"

#include <algorithm>
#include <iomanip>
#include <sstream>

namespace shardwise::observe {

std::string megabytes(int64_t bytes) {
  std::ostringstream text;
  text << std::fixed << std::setprecision(2) << static_cast<double>(bytes) / 1e6;
  return text.str();
}

std::vector<std::string> aligned(const std::vector<Row>& rows) {
  std::vector<size_t> widths(rows.front().size());
  for (const auto& row : rows) {
    for (size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], row[i].size());
  }
  std::vector<std::string> lines;
  for (const auto& row : rows) {
    std::ostringstream text;
    for (size_t i = 0; i < row.size(); ++i) {
      text << (i ? "  " : "") << (i ? std::right : std::left) << std::setw(static_cast<int>(widths[i])) << row[i];
    }
    lines.push_back(text.str());
  }
  return lines;
}

} // namespace shardwise::observe
