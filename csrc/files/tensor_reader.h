#pragma once

#include "files/checksum.h"
#include "files/disk.h"
#include "files/tensor_header.h"

#include <memory>
#include <optional>
#include <string>

namespace shardwise::files {

/// An open safetensors file, or another one with tensors. With a record, it verifies the header and each block of data
/// before it hands them out. For one thread at a time.
class SHARDWISE_API TensorReader {
 public:
  /// Reads the header. `record` is the checkpoint's record of the file; files of other programs have none.
  /// Raises Error for a file that is not as its record says, and for what parse_header() refuses.
  TensorReader(Disk& disk, std::string path, std::optional<FileRecord> record);
  /// A file of another kind, of which all is data.
  TensorReader(Disk& disk, std::string path);

  const TensorHeader& header() const {
    return header_;
  }

  /// Copies bytes of the file's data, from this one on, into `memory`, which is of no use after an error. Small reads
  /// that follow each other go to the disk once a block.
  /// Raises Error, with the tensor and its bytes, for data that is not what was written.
  void read(int64_t offset, std::span<std::byte> memory, const std::string& tensor);

 private:
  int64_t length_of_block(int64_t block) const;
  /// Reads a whole block to this place, and verifies it.
  void read_block(int64_t block, std::byte* place, const std::string& tensor);

  std::string path_;
  std::optional<FileRecord> record_;
  std::unique_ptr<DiskFile> file_;
  TensorHeader header_;
  int64_t header_bytes_ = 0;
  int64_t data_bytes_ = 0;
  /// The block that was last read in part.
  std::unique_ptr<std::byte[]> buffer_;
  std::optional<int64_t> buffered_;
};

} // namespace shardwise::files
