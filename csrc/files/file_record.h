#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace shardwise::files {

/// The bytes of a file's data that have one checksum: a reader of a range verifies the blocks that it touches.
constexpr int64_t kBlockBytes = int64_t{4} * 1024 * 1024;

/// What a checkpoint knows of one of its files, to verify it.
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

/// How many blocks data has.
constexpr int64_t block_count(int64_t data_bytes) {
  return data_bytes / kBlockBytes + (data_bytes % kBlockBytes != 0 ? 1 : 0);
}

} // namespace shardwise::files
