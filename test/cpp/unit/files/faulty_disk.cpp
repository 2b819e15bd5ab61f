#include "unit/files/faulty_disk.h"

#include <algorithm>
#include <cerrno>

namespace shardwise::test {

using files::Bytes;
using files::DiskError;

template <typename Do, typename Half>
auto FaultyDisk::step(const std::string& name, bool needs_room, const Do& what, const Half& half) -> decltype(what()) {
  if (crashed_) throw Crash();
  if (full_ && needs_room) throw DiskError(name, ENOSPC);
  steps_.push_back(name);
  if (static_cast<int64_t>(steps_.size()) - 1 != at_) return what();
  switch (fault_) {
    case Fault::fails:
      throw DiskError(name, EIO);
    case Fault::fails_when_done:
      what();
      throw DiskError(name, EIO);
    case Fault::full:
      full_ = true;
      if (needs_room) return half();
      return what();
    case Fault::short_count:
      return half();
    case Fault::crashes:
      crashed_ = true;
      throw Crash();
    case Fault::crashes_when_done:
      crashed_ = true;
      what();
      throw Crash();
    case Fault::waits:
      meanwhile();
      break;
    case Fault::none:
      break;
  }
  return what();
}

class FaultyDisk::File final : public files::DiskFile {
 public:
  File(FaultyDisk& disk, std::unique_ptr<files::DiskFile> inner) : disk_(disk), inner_(std::move(inner)) {
    disk_.most_open_files_ = std::max(disk_.most_open_files_, ++disk_.open_files_);
  }
  ~File() override {
    --disk_.open_files_;
  }

  size_t write(Bytes bytes) override {
    return disk_.step(
        "write", true, [&] { return inner_->write(bytes); },
        [&] { return inner_->write(bytes.first((bytes.size() + 1) / 2)); });
  }
  size_t read(std::span<std::byte> bytes, int64_t offset) override {
    return disk_.step(
        "read", false, [&] { return inner_->read(bytes, offset); },
        [&] { return inner_->read(bytes.first((bytes.size() + 1) / 2), offset); });
  }
  int64_t size() override {
    return disk_.step("size", false, [&] { return inner_->size(); });
  }
  void sync() override {
    disk_.step("sync", true, [&] { inner_->sync(); });
  }

 private:
  FaultyDisk& disk_;
  std::unique_ptr<files::DiskFile> inner_;
};

std::unique_ptr<files::DiskFile> FaultyDisk::create(const std::string& path) {
  return std::make_unique<File>(*this, step("create " + path, true, [&] { return inner_.create(path); }));
}
std::unique_ptr<files::DiskFile> FaultyDisk::open(const std::string& path) {
  return std::make_unique<File>(*this, step("open " + path, false, [&] { return inner_.open(path); }));
}
void FaultyDisk::make_folder(const std::string& path) {
  step("make_folder " + path, true, [&] { inner_.make_folder(path); });
}
void FaultyDisk::sync_folder(const std::string& path) {
  step("sync_folder " + path, true, [&] { inner_.sync_folder(path); });
}
void FaultyDisk::rename(const std::string& from, const std::string& to) {
  step("rename " + from, true, [&] { inner_.rename(from, to); });
}
bool FaultyDisk::exchange(const std::string& one, const std::string& other) {
  return step("exchange " + one, true, [&] { return inner_.exchange(one, other); });
}
void FaultyDisk::remove_file(const std::string& path) {
  step("remove_file " + path, false, [&] { inner_.remove_file(path); });
}
void FaultyDisk::remove_folder(const std::string& path) {
  step("remove_folder " + path, false, [&] { inner_.remove_folder(path); });
}
std::optional<files::Disk::Kind> FaultyDisk::kind(const std::string& path) {
  return step("kind " + path, false, [&] { return inner_.kind(path); });
}
bool FaultyDisk::is_link(const std::string& path) {
  return step("is_link " + path, false, [&] { return inner_.is_link(path); });
}
std::vector<std::string> FaultyDisk::list(const std::string& path) {
  return step("list " + path, false, [&] { return inner_.list(path); });
}

} // namespace shardwise::test
