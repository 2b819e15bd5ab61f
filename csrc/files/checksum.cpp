#include "files/checksum.h"

// Inlined, so that the library neither links nor exports anything of it.
#define XXH_INLINE_ALL
#include <xxhash.h>

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
  if (text.size() != 16) return {};
  uint64_t checksum = 0;
  for (const auto digit : text) {
    const bool is_letter = digit >= 'a' && digit <= 'f';
    if (!is_letter && !(digit >= '0' && digit <= '9')) return {};
    checksum = checksum << 4U | static_cast<uint64_t>(is_letter ? digit - 'a' + 10 : digit - '0');
  }
  return checksum;
}

} // namespace shardwise::files
