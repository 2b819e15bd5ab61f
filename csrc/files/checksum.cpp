#include "files/checksum.h"

// Inlined, so that the library neither links nor exports anything of it.
#define XXH_INLINE_ALL
#include <xxhash.h>

#include <charconv>

namespace shardwise::files {

uint64_t checksum(Bytes bytes) {
  return XXH3_64bits(bytes.data(), bytes.size());
}

uint64_t checksum(std::string_view text) {
  return checksum(std::as_bytes(std::span(text)));
}

std::string checksum_text(uint64_t checksum) {
  std::string text(16, '0');
  for (size_t i = 0; i < text.size(); ++i) text[i] = "0123456789abcdef"[checksum >> (60 - 4 * i) & 15U];
  return text;
}

std::optional<uint64_t> parse_checksum(std::string_view text) {
  uint64_t checksum = 0;
  std::from_chars(text.data(), text.data() + text.size(), checksum, 16);
  return checksum_text(checksum) == text ? std::optional(checksum) : std::nullopt;
}

} // namespace shardwise::files
