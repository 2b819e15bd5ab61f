#pragma once

#include "files/checksum.h"

#include <shardwise/error.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace shardwise::files {

/// An operation on files failed: which, on what, and why.
class SHARDWISE_API DiskError : public Error {
 public:
  /// `doing` goes into "shardwise: DOING failed", such as: writing to step-1/model.safetensors.
  DiskError(const std::string& doing, int number);

  /// The system's number of the error: ENOSPC, EIO ...
  int number() const {
    return number_;
  }

 private:
  int number_;
};

/// An open file. Closes itself.
class SHARDWISE_API DiskFile {
 public:
  virtual ~DiskFile() = default;

  /// Writes after what was written before, perhaps less than all: returns how many bytes.
  virtual size_t write(Bytes bytes) = 0;
  /// Reads from this byte on, perhaps less than all: returns how many bytes, 0 only at the end of the file.
  virtual size_t read(std::span<std::byte> bytes, int64_t offset) = 0;
  virtual int64_t size() = 0;
  /// Waits until what was written will survive a loss of power.
  virtual void sync() = 0;
};

/// All operations on files and folders that checkpoints need, so that a test can let each of them fail. Every one
/// raises DiskError. What a folder has survives a loss of power only once the folder was synced too.
class SHARDWISE_API Disk {
 public:
  enum class Kind { file, folder, other };

  virtual ~Disk() = default;
  /// The disks of this machine.
  static Disk& real();

  /// A new file to write; there must be none of this name.
  virtual std::unique_ptr<DiskFile> create(const std::string& path) = 0;
  /// A file to read.
  virtual std::unique_ptr<DiskFile> open(const std::string& path) = 0;
  virtual void make_folder(const std::string& path) = 0;
  virtual void sync_folder(const std::string& path) = 0;
  /// Takes the place of an empty folder, but not of another.
  virtual void rename(const std::string& from, const std::string& to) = 0;
  /// Lets two folders change places in one step; false if the file system cannot do that.
  virtual bool exchange(const std::string& one, const std::string& other) = 0;
  virtual void remove_file(const std::string& path) = 0;
  /// It must be empty.
  virtual void remove_folder(const std::string& path) = 0;
  /// The kind of what lies there, behind links; nothing if nothing does.
  virtual std::optional<Kind> kind(const std::string& path) = 0;
  virtual bool is_link(const std::string& path) = 0;
  /// The names in a folder, in alphabetical order.
  virtual std::vector<std::string> list(const std::string& path) = 0;
};

/// Writes all of it.
SHARDWISE_API void write_all(DiskFile& file, Bytes bytes, const std::string& path);
/// A new file with this text, which will survive a loss of power once its folder is synced.
SHARDWISE_API void write_file(Disk& disk, const std::string& path, std::string_view text);
/// Reads all of it.
/// Raises Error if the file is too short.
SHARDWISE_API void read_all(DiskFile& file, std::span<std::byte> bytes, int64_t offset, const std::string& path);
/// Reads a whole file as text.
/// Raises Error if it has more bytes than `most`.
SHARDWISE_API std::string read_text(Disk& disk, const std::string& path, int64_t most);

/// The path without slashes at its end.
SHARDWISE_API std::string without_slashes(const std::string& path);
/// The path without its last part ("." if it has no other), and that part. Slashes at the end count for nothing.
SHARDWISE_API std::string folder_of(const std::string& path);
SHARDWISE_API std::string name_of(const std::string& path);

} // namespace shardwise::files
