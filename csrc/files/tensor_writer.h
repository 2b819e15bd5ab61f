#pragma once

#include "files/box.h"
#include "files/checksum.h"
#include "files/disk.h"
#include "files/tensor_header.h"

#include <c10/core/ScalarType.h>

#include <string>
#include <vector>

namespace shardwise::files {

/// A tensor, or a piece of one, and its values.
struct TensorToWrite {
  std::string name;
  c10::ScalarType dtype = c10::ScalarType::Float;
  /// Where the piece lies in the whole tensor.
  Box box;
  /// Its bytes in row-major order; together those of the box. They must stay until they are written.
  std::vector<Bytes> data;
};

/// Writes a new safetensors file, and waits until it will survive a loss of power. The caller must sync its folder. It
/// needs memory for one block.
/// Raises ValueError, before the disk is touched, for what make_header() refuses and for data that is not as long as
/// its box; DiskError if the disk fails, which leaves a part of the file.
SHARDWISE_API FileRecord write_tensor_file(
    Disk& disk, const std::string& path, const std::vector<TensorToWrite>& tensors, FileKind kind = FileKind::pieces);

} // namespace shardwise::files
