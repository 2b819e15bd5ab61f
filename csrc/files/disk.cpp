#include "files/disk.h"

#include <c10/util/StringUtil.h>

#include <cerrno>
#include <cstring>

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

} // namespace

DiskError::DiskError(const std::string& doing, int number)
    : Error(c10::str(
          "shardwise: ", doing, " failed: ", std::strerror(number), " (error ", number, "). ", remedy_for(number))),
      number_(number) {}

void write_all(DiskFile& file, Bytes bytes, const std::string& path) {
  while (!bytes.empty()) {
    const auto written = file.write(bytes);
    // A disk that takes nothing, and says no reason, would keep us for ever.
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

} // namespace shardwise::files
