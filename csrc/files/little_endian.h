#pragma once

#include <cstdint>
#include <string_view>

namespace shardwise::files {

/// The number that these bytes are, the lowest first: 8 of them at most.
constexpr uint64_t little_endian(std::string_view bytes) {
  uint64_t number = 0;
  for (size_t i = bytes.size(); i-- > 0;) number = number << 8U | static_cast<unsigned char>(bytes[i]);
  return number;
}

} // namespace shardwise::files
