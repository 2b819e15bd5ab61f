#pragma once

#include "files/disk.h"

#include <cstdint>
#include <map>
#include <string>

namespace shardwise::files {

/// Where bytes lie in a file.
struct FileRange {
  int64_t begin = 0;
  int64_t end = 0;
};

/// The directory of a zip archive, in which Python's torch.save() puts a pickle and the memory of each tensor, one file
/// each and uncompressed. Torch's own reader would uncompress whatever an archive has: 2 MB may take 12 GB of memory.
/// Nothing in an archive is trusted.
class ZipDirectory {
 public:
  /// Reads the directory only.
  /// Raises Error, with `path`, for what is not one.
  ZipDirectory(DiskFile& file, std::string path);

  /// What the archive says of a file in it.
  struct Entry {
    int64_t header = 0;
    int64_t bytes = 0;
    bool is_plain = true;
  };
  /// By name.
  const std::map<std::string, Entry>& entries() const {
    return entries_;
  }

  /// Where the bytes of a file of the archive lie.
  /// Raises Error for one that is not there, is compressed or encrypted, or does not lie in the archive.
  FileRange range(const std::string& name);

 private:
  [[noreturn]] void fail(const std::string& why) const;
  /// Bytes of the archive.
  std::string read(int64_t begin, int64_t bytes, const char* what);
  void add_entries(const std::string& directory);

  DiskFile& file_;
  std::string path_;
  int64_t size_;
  std::map<std::string, Entry> entries_;
};

/// What is said of a file of torch.save() that is none, or broken.
[[noreturn]] void fail_torch_file(const std::string& path, const std::string& why);

} // namespace shardwise::files
