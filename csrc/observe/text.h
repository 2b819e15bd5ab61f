#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace shardwise::observe {

using Row = std::vector<std::string>;

std::string megabytes(int64_t bytes);
/// Aligns the first column to the left, and the others to the right.
std::string aligned(const std::vector<Row>& rows);

} // namespace shardwise::observe
