#pragma once

#include <shardwise/export.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>

namespace shardwise::files {

using Bytes = std::span<const std::byte>;

/// XXH3, 64 bits: it notices what disks and networks do to data, not what an enemy does.
SHARDWISE_API uint64_t checksum(Bytes bytes);
SHARDWISE_API uint64_t checksum(std::string_view text);

/// A checksum as 16 digits, and back; nothing where the text is none.
SHARDWISE_API std::string checksum_text(uint64_t checksum);
SHARDWISE_API std::optional<uint64_t> parse_checksum(std::string_view text);

} // namespace shardwise::files
