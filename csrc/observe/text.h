#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace shardwise::observe {

using Row = std::vector<std::string>;

std::string megabytes(int64_t bytes);
/// A line for each row: the first column is aligned to the left, the others to the right.
std::vector<std::string> aligned(const std::vector<Row>& rows);

} // namespace shardwise::observe
