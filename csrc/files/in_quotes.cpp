#include "files/in_quotes.h"

#include <cstdint>

namespace shardwise::files {
namespace {

constexpr size_t kLongest = 200;

/// The bytes of the character that begins here; 0 if none does.
size_t character_at(std::string_view text, size_t at) {
  const auto byte = [&](size_t i) { return at + i < text.size() ? static_cast<unsigned char>(text[at + i]) : 0U; };
  const auto first = byte(0);
  if (first < 0x80) return 1;
  const size_t bytes = first >= 0xF0 ? 4 : first >= 0xE0 ? 3 : 2;
  if (first < 0xC2 || first > 0xF4) return 0;
  uint32_t code = first & (0xFFU >> (bytes + 1));
  for (size_t i = 1; i < bytes; ++i) {
    if ((byte(i) & 0xC0U) != 0x80U) return 0;
    code = code << 6U | (byte(i) & 0x3FU);
  }
  const bool is_surrogate = code >= 0xD800 && code <= 0xDFFF;
  const bool is_too_long = (bytes == 3 && code < 0x800) || (bytes == 4 && code < 0x10000);
  return is_surrogate || is_too_long || code > 0x10FFFF ? 0 : bytes;
}

} // namespace

bool is_utf8(std::string_view text) {
  for (size_t at = 0; at < text.size();) {
    const auto bytes = character_at(text, at);
    if (bytes == 0) return false;
    at += bytes;
  }
  return true;
}

std::string in_quotes(std::string_view text) {
  constexpr const char* kDigits = "0123456789abcdef";
  std::string result = "'";
  for (size_t at = 0; at < text.size();) {
    if (result.size() > kLongest) return result + "...'";
    const auto bytes = character_at(text, at);
    const auto byte = static_cast<unsigned char>(text[at]);
    if (bytes == 0 || byte < 0x20 || byte == 0x7F) {
      result += "\\x";
      result += kDigits[byte >> 4U];
      result += kDigits[byte & 15U];
      ++at;
    } else {
      result += text.substr(at, bytes);
      at += bytes;
    }
  }
  return result + "'";
}

} // namespace shardwise::files
