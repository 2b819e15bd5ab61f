#pragma once

#include "files/disk.h"

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace shardwise::test {

/// The process or the machine died. No std::exception, so that nothing handles it.
struct Crash {};

/// A disk whose operations are counted, and of which one goes wrong.
class FaultyDisk final : public files::Disk {
 public:
  enum class Fault {
    none,
    /// It fails and does nothing.
    fails,
    /// It is done, but said to have failed.
    fails_when_done,
    /// The disk is full: a write takes half, and everything that needs room fails from now on.
    full,
    /// A write or read does half of what it is asked for, and says so.
    short_count,
    /// Nothing works from this operation on, or from the next one on.
    crashes,
    crashes_when_done,
    /// Something else happens before it.
    waits,
  };

  explicit FaultyDisk(files::Disk& inner, int64_t at = -1, Fault fault = Fault::none)
      : inner_(inner),
        at_(at),
        fault_(fault) {}

  /// What happens where it waits.
  std::function<void()> meanwhile;

  /// The operations so far, by name.
  const std::vector<std::string>& steps() const {
    return steps_;
  }
  /// The most files that were open at a time.
  int most_open_files() const {
    return most_open_files_;
  }

  std::unique_ptr<files::DiskFile> create(const std::string& path) override {
    return std::make_unique<File>(*this, step("create " + path, true, [&] { return inner_.create(path); }));
  }
  std::unique_ptr<files::DiskFile> open(const std::string& path) override {
    return std::make_unique<File>(*this, step("open " + path, false, [&] { return inner_.open(path); }));
  }
  void make_folder(const std::string& path) override {
    step("make_folder " + path, true, [&] { inner_.make_folder(path); });
  }
  void sync_folder(const std::string& path) override {
    step("sync_folder " + path, true, [&] { inner_.sync_folder(path); });
  }
  void rename(const std::string& from, const std::string& to) override {
    step("rename " + from, true, [&] { inner_.rename(from, to); });
  }
  bool exchange(const std::string& one, const std::string& other) override {
    return step("exchange " + one, true, [&] { return inner_.exchange(one, other); });
  }
  void remove_file(const std::string& path) override {
    step("remove_file " + path, false, [&] { inner_.remove_file(path); });
  }
  void remove_folder(const std::string& path) override {
    step("remove_folder " + path, false, [&] { inner_.remove_folder(path); });
  }
  std::optional<Kind> kind(const std::string& path) override {
    return step("kind " + path, false, [&] { return inner_.kind(path); });
  }
  bool is_link(const std::string& path) override {
    return step("is_link " + path, false, [&] { return inner_.is_link(path); });
  }
  std::vector<std::string> list(const std::string& path) override {
    return step("list " + path, false, [&] { return inner_.list(path); });
  }

 private:
  class File final : public files::DiskFile {
   public:
    File(FaultyDisk& disk, std::unique_ptr<files::DiskFile> inner) : disk_(disk), inner_(std::move(inner)) {
      disk_.most_open_files_ = std::max(disk_.most_open_files_, ++disk_.open_files_);
    }
    ~File() override {
      --disk_.open_files_;
    }

    size_t write(files::Bytes bytes) override {
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

  /// Does an operation, or what is to go wrong in its place. `half` does less of it, if it can.
  template <typename Do, typename Half>
  auto step(const std::string& name, bool needs_room, const Do& what, const Half& half) -> decltype(what()) {
    if (crashed_) throw Crash();
    if (full_ && needs_room) throw files::DiskError(name, ENOSPC);
    steps_.push_back(name);
    if (static_cast<int64_t>(steps_.size()) - 1 != at_) return what();
    switch (fault_) {
      case Fault::fails:
        throw files::DiskError(name, EIO);
      case Fault::fails_when_done:
        what();
        throw files::DiskError(name, EIO);
      case Fault::full:
        full_ = true;
        return needs_room ? half() : what();
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
  template <typename Do>
  auto step(const std::string& name, bool needs_room, const Do& what) -> decltype(what()) {
    return step(name, needs_room, what, what);
  }

  files::Disk& inner_;
  int64_t at_;
  Fault fault_;
  bool crashed_ = false;
  bool full_ = false;
  int open_files_ = 0;
  int most_open_files_ = 0;
  std::vector<std::string> steps_;
};

/// The number of the first of these operations whose name begins so, from that one on.
inline int64_t place_of(const std::string& operation, const std::vector<std::string>& steps, int64_t from = 0) {
  while (!steps.at(static_cast<size_t>(from)).starts_with(operation)) ++from;
  return from;
}

} // namespace shardwise::test
