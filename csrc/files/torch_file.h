#pragma once

#include "files/disk.h"
#include "files/folder_index.h"
#include "files/json.h"

#include <map>
#include <string>

namespace shardwise::files {

/// What a file of Python's torch.save() has.
struct TorchFile {
  /// The tensors of a state dict, of which each is one chunk of the file.
  std::map<std::string, SavedTensor> tensors;
  /// The numbers, texts and truth values that lie beside tensors or state dicts.
  Json::Object values;
};

/// Whether a file is one, by its first bytes.
/// Raises Error for one in the format that torch had before version 1.6.
SHARDWISE_API bool is_torch_file(DiskFile& file, const std::string& path);

/// Reads which tensors lie where. The file is a state dict, or a dictionary whose `entry` is one. Nothing in the file
/// is run or trusted. Raises Error, with the name of what it is, for anything but plain tensors of this machine's byte
/// order; for a tensor that does not lie in the file; and for a dictionary of state dicts without an entry.
SHARDWISE_API TorchFile read_torch_file(DiskFile& file, const std::string& path, const std::string& entry);

} // namespace shardwise::files
