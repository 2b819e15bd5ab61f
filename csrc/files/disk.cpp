#include "files/disk.h"

#include <c10/util/StringUtil.h>

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <utility>

namespace shardwise::files {
namespace {

const char* remedy_for(int number) {
  switch (number) {
    case ENOSPC:
    case EDQUOT:
      return "Free some room there, or save to another disk.";
    case EACCES:
    case EPERM:
    case EROFS:
      return "Save to a folder that this process may write to, or change its permissions.";
    case EFBIG:
      return "Files may not be so large there: raise the limit (ulimit -f), save to another file system, or save from "
             "more ranks, each of which writes less.";
    case ENOENT:
      return "Check the path.";
    default:
      return "Check the disk and the path.";
  }
}

/// Calls again what a signal interrupted.
template <typename Call>
auto uninterrupted(const Call& call) {
  auto result = call();
  while (result < 0 && errno == EINTR) result = call();
  return result;
}

/// Raises DiskError if a call of the system failed.
void must(bool good, const std::string& doing) {
  if (!good) throw DiskError(doing, errno);
}

class RealFile final : public DiskFile {
 public:
  RealFile(std::string path, int flags) : path_(std::move(path)) {
    descriptor_ = uninterrupted([&] { return ::open(path_.c_str(), flags, 0666); });
    must(descriptor_ >= 0, "opening " + path_);
  }
  RealFile(const RealFile&) = delete;
  RealFile& operator=(const RealFile&) = delete;
  // sync() reported before what a written file lost.
  ~RealFile() override {
    ::close(descriptor_);
  }

  size_t write(Bytes bytes) override {
    const auto written = uninterrupted([&] { return ::write(descriptor_, bytes.data(), bytes.size()); });
    must(written >= 0, "writing to " + path_);
    // The disk begins at once, so that sync() has less to wait for. sync() reports errors.
    ::sync_file_range(descriptor_, written_, written, SYNC_FILE_RANGE_WRITE);
    written_ += written;
    return static_cast<size_t>(written);
  }
  size_t read(std::span<std::byte> bytes, int64_t offset) override {
    const auto read = uninterrupted([&] { return ::pread(descriptor_, bytes.data(), bytes.size(), offset); });
    must(read >= 0, "reading " + path_);
    return static_cast<size_t>(read);
  }
  int64_t size() override {
    struct stat status {};
    must(::fstat(descriptor_, &status) == 0, "looking at " + path_);
    // Reading anything else would wait, or never end.
    if (!S_ISREG(status.st_mode)) throw DiskError("reading " + path_ + ", which is not a regular file,", EINVAL);
    return status.st_size;
  }
  void sync() override {
    must(uninterrupted([&] { return ::fsync(descriptor_); }) == 0, "writing " + path_ + " to the disk");
  }

 private:
  std::string path_;
  int descriptor_ = -1;
  int64_t written_ = 0;
};

class RealDisk final : public Disk {
 public:
  std::unique_ptr<DiskFile> create(const std::string& path) override {
    return std::make_unique<RealFile>(path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC);
  }
  // Without waiting for the other end, should it be a pipe.
  std::unique_ptr<DiskFile> open(const std::string& path) override {
    return std::make_unique<RealFile>(path, O_RDONLY | O_NONBLOCK | O_CLOEXEC);
  }
  void make_folder(const std::string& path) override {
    must(::mkdir(path.c_str(), 0777) == 0, "making the folder " + path);
  }
  // Some file systems know no such thing, and say so.
  void sync_folder(const std::string& path) override {
    try {
      RealFile(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC).sync();
    } catch (const DiskError& error) {
      if (error.number() != EINVAL) throw;
    }
  }
  void rename(const std::string& from, const std::string& to) override {
    must(::rename(from.c_str(), to.c_str()) == 0, "renaming " + from + " to " + to);
  }
  bool exchange(const std::string& one, const std::string& other) override {
    if (::renameat2(AT_FDCWD, one.c_str(), AT_FDCWD, other.c_str(), RENAME_EXCHANGE) == 0) return true;
    if (errno == EINVAL || errno == ENOSYS || errno == EOPNOTSUPP) return false;
    throw DiskError("letting " + one + " and " + other + " change places", errno);
  }
  void remove_file(const std::string& path) override {
    must(::unlink(path.c_str()) == 0, "removing " + path);
  }
  void remove_folder(const std::string& path) override {
    must(::rmdir(path.c_str()) == 0, "removing the folder " + path);
  }
  std::optional<Kind> kind(const std::string& path) override {
    struct stat status {};
    if (::stat(path.c_str(), &status) == 0)
      return S_ISREG(status.st_mode) ? Kind::file : S_ISDIR(status.st_mode) ? Kind::folder : Kind::other;
    if (errno == ENOENT || errno == ENOTDIR) return {};
    throw DiskError("looking at " + path, errno);
  }
  bool is_link(const std::string& path) override {
    struct stat status {};
    return ::lstat(path.c_str(), &status) == 0 && S_ISLNK(status.st_mode);
  }
  std::vector<std::string> list(const std::string& path) override {
    std::vector<std::string> names;
    std::error_code error;
    std::filesystem::directory_iterator entry(path, error);
    for (; !error && entry != std::filesystem::directory_iterator(); entry.increment(error))
      names.push_back(entry->path().filename());
    if (error) throw DiskError("listing " + path, error.value());
    std::sort(names.begin(), names.end());
    return names;
  }
};

} // namespace

DiskError::DiskError(const std::string& doing, int number)
    : Error(c10::str(
          "shardwise: ", doing, " failed: ", std::strerror(number), " (error ", number, "). ", remedy_for(number))),
      number_(number) {}

void write_all(DiskFile& file, Bytes bytes, const std::string& path) {
  while (!bytes.empty()) {
    const auto written = file.write(bytes);
    // A disk that writes nothing, without an error, would make this loop endless.
    if (written == 0) throw DiskError("writing to " + path, ENOSPC);
    bytes = bytes.subspan(written);
  }
}

void write_file(Disk& disk, const std::string& path, std::string_view text) {
  const auto file = disk.create(path);
  write_all(*file, std::as_bytes(std::span(text)), path);
  file->sync();
}

void read_all(DiskFile& file, std::span<std::byte> bytes, int64_t offset, const std::string& path) {
  while (!bytes.empty()) {
    const auto read = file.read(bytes, offset);
    if (read == 0) {
      throw Error(c10::str(
          "shardwise: ", path, " ends at byte ", offset, ", and ", bytes.size(),
          " more were to be there: it was cut off. Restore the file from a copy, or load another checkpoint."));
    }
    bytes = bytes.subspan(read);
    offset += static_cast<int64_t>(read);
  }
}

std::string read_text(Disk& disk, const std::string& path, int64_t most) {
  const auto file = disk.open(path);
  const auto bytes = file->size();
  if (bytes > most) {
    throw Error(c10::str(
        "shardwise: ", path, " has ", bytes, " bytes; what shardwise or torch writes there has at most ", most,
        ". Check the path."));
  }
  std::string text(static_cast<size_t>(bytes), '\0');
  read_all(*file, std::as_writable_bytes(std::span(text)), 0, path);
  return text;
}

std::string without_slashes(const std::string& path) {
  const auto last = path.find_last_not_of('/');
  return last == std::string::npos ? path.substr(0, 1) : path.substr(0, last + 1);
}

std::string folder_of(const std::string& path) {
  const auto trimmed = without_slashes(path);
  const auto slash = trimmed.rfind('/');
  if (slash == std::string::npos) return ".";
  return slash == 0 ? "/" : without_slashes(trimmed.substr(0, slash));
}

std::string name_of(const std::string& path) {
  const auto trimmed = without_slashes(path);
  return trimmed.substr(trimmed.rfind('/') + 1);
}

Disk& Disk::real() {
  static RealDisk disk;
  return disk;
}

} // namespace shardwise::files
