#pragma once

#include "files/disk.h"

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

  explicit FaultyDisk(files::Disk& inner) : inner_(inner) {}
  FaultyDisk(files::Disk& inner, int64_t at, Fault fault) : inner_(inner), at_(at), fault_(fault) {}

  /// What happens where it waits.
  std::function<void()> meanwhile;

  /// The operations so far, by name.
  const std::vector<std::string>& steps() const {
    return steps_;
  }
  /// The number of the first operation whose name begins so, from that one on.
  int64_t place_of(const std::string& operation, int64_t from = 0) const {
    while (!steps_.at(static_cast<size_t>(from)).starts_with(operation)) ++from;
    return from;
  }
  /// The most files that were open at a time.
  int most_open_files() const {
    return most_open_files_;
  }

  std::unique_ptr<files::DiskFile> create(const std::string& path) override;
  std::unique_ptr<files::DiskFile> open(const std::string& path) override;
  void make_folder(const std::string& path) override;
  void sync_folder(const std::string& path) override;
  void rename(const std::string& from, const std::string& to) override;
  bool exchange(const std::string& one, const std::string& other) override;
  void remove_file(const std::string& path) override;
  void remove_folder(const std::string& path) override;
  std::optional<Kind> kind(const std::string& path) override;
  bool is_link(const std::string& path) override;
  std::vector<std::string> list(const std::string& path) override;

 private:
  class File;

  /// Does an operation, or what is to go wrong in its place. `half` does less of it, if it can.
  template <typename Do, typename Half>
  auto step(const std::string& name, bool needs_room, const Do& what, const Half& half) -> decltype(what());
  template <typename Do>
  auto step(const std::string& name, bool needs_room, const Do& what) -> decltype(what()) {
    return step(name, needs_room, what, what);
  }

  files::Disk& inner_;
  int64_t at_ = -1;
  Fault fault_ = Fault::none;
  bool crashed_ = false;
  bool full_ = false;
  int open_files_ = 0;
  int most_open_files_ = 0;
  std::vector<std::string> steps_;
};

} // namespace shardwise::test
