#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace shardwise::observe {

using Row = std::vector<std::string>;

std::string two_places(double number);
inline std::string megabytes(int64_t bytes) {
  return two_places(static_cast<double>(bytes) / 1e6);
}
/// A line for each row: the first column is aligned to the left, the others to the right.
std::vector<std::string> aligned(const std::vector<Row>& rows);

/// A table of numbers, each with a bar beside it.
class Bars {
 public:
  Bars(const std::string& of, const std::string& unit) : rows_{{of, unit}} {}
  void add(const std::string& title, const std::string& number, double length);
  std::string text() const;

 private:
  std::vector<Row> rows_;
  std::vector<double> lengths_;
};

} // namespace shardwise::observe
