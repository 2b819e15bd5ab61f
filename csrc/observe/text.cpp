#include "observe/text.h"

#include <algorithm>
#include <cmath>
#include <iomanip>
#include <sstream>

namespace shardwise::observe {

std::string two_places(double number) {
  std::ostringstream text;
  text << std::fixed << std::setprecision(2) << number;
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

void Bars::add(const std::string& title, const std::string& number, double length) {
  rows_.push_back({title, number});
  lengths_.push_back(length);
}

std::string Bars::text() const {
  constexpr double kWidth = 32;
  const auto lines = aligned(rows_);
  auto text = lines.front() + "\n";
  const auto most = *std::max_element(lengths_.begin(), lengths_.end());
  for (size_t i = 0; i < lengths_.size(); ++i) {
    const auto width = most > 0 ? std::lround(kWidth * lengths_[i] / most) : 0;
    text += lines[i + 1] + (width > 0 ? "  " + std::string(static_cast<size_t>(width), '#') : "") + "\n";
  }
  return text;
}

} // namespace shardwise::observe
