#pragma once

#include "files/folder_index.h"
#include "files/tensor_reader.h"

#include <map>
#include <string>
#include <vector>

namespace shardwise::files {

/// The values of a checkpoint's tensors. If shardwise wrote it, they are verified as they are read. For one thread at a
/// time.
class SHARDWISE_API SavedFolder {
 public:
  /// Raises what read_folder_index() raises.
  SavedFolder(Disk& disk, const std::string& place, const std::string& entry = "");
  SavedFolder(SavedFolder&&) = default;
  SavedFolder(const SavedFolder&) = delete;

  const FolderIndex& index() const {
    return index_;
  }

  /// Raises ValueError for a tensor that is not there, Error for one of a dtype that torch does not have.
  const SavedTensor& tensor(const std::string& name) const;

  /// Reads a piece of a tensor, row-major, into memory of just its bytes; of files only the blocks that it needs.
  /// Raises what tensor() raises; ValueError for a box that lies outside of it, and for memory of another size; Error
  /// if the values are not those that were saved, or if the checkpoint was replaced meanwhile. `memory` is of no use
  /// after an error.
  void read(const std::string& name, const Box& box, std::span<std::byte> memory);

 private:
  TensorReader& reader(const std::string& file);

  Disk& disk_;
  FolderIndex index_;
  /// Open files; few of them, for a process may have few.
  std::map<std::string, TensorReader> readers_;
};

/// Reads all of a checkpoint of ours. Returns what is wrong, an entry for each file that is not what was saved; empty
/// if all is well. Raises what read_folder_index() raises, and ValueError for a checkpoint that shardwise did not
/// write.
SHARDWISE_API std::vector<std::string> verify_checkpoint(Disk& disk, const std::string& place);

} // namespace shardwise::files
