#pragma once

#include <shardwise/detail/export.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace shardwise::files {

using Bytes = std::span<const std::byte>;

/// XXH3, 64 bits: it notices what disks and networks do to data, not what an enemy does.
SHARDWISE_API uint64_t checksum(Bytes bytes);
SHARDWISE_API uint64_t checksum(std::string_view text);

/// A checksum as 16 digits, and back; nothing if the text is none.
SHARDWISE_API std::string checksum_text(uint64_t checksum);
SHARDWISE_API std::optional<uint64_t> parse_checksum(std::string_view text);

/// The bytes of a file's data that have one checksum: a reader of a range verifies the blocks that it touches.
constexpr int64_t kBlockBytes = int64_t{4} * 1024 * 1024;

/// A checkpoint's record of one of its files, to verify it.
struct FileRecord {
  /// In the checkpoint's folder.
  std::string name;
  int64_t bytes = 0;
  /// With the bytes of its length; the data begins there.
  int64_t header_bytes = 0;
  uint64_t header_checksum = 0;
  /// One for each block of the data, in order; the last block may be shorter.
  std::vector<uint64_t> blocks;

  bool operator==(const FileRecord&) const = default;
};

} // namespace shardwise::files
