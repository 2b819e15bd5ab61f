#pragma once

#include "files/disk.h"

#include <map>
#include <memory>
#include <random>
#include <string>
#include <vector>

namespace shardwise::test {

/// A disk in memory that forgets what it may. After a loss of power a file that was not synced has any beginning of
/// what was written, or nothing, or zeros; and a folder has made any of the changes since it was synced, each of them
/// whole, but none to a name whose last change is lost.
class MemoryDisk final : public files::Disk {
 public:
  struct Node {
    bool is_folder = false;
    std::string content;
    bool is_synced = false;
    std::map<std::string, std::shared_ptr<Node>> entries;
    std::map<std::string, std::shared_ptr<Node>> durable;
    /// What changed since the last sync: names, and what lies there now, nothing where it was removed.
    std::vector<std::map<std::string, std::shared_ptr<Node>>> changes;
  };

  MemoryDisk();
  MemoryDisk(const MemoryDisk&) = delete;

  /// A disk with the same content, all of it durable.
  std::unique_ptr<MemoryDisk> copy() const;
  /// What is left after a loss of power; the seed chooses.
  void lose_power(uint64_t seed);
  /// A file's content, to be changed by the test.
  std::string& content(const std::string& path);
  /// Whether folders can change places in one step.
  bool can_exchange = true;

  std::unique_ptr<files::DiskFile> create(const std::string& path) override;
  std::unique_ptr<files::DiskFile> open(const std::string& path) override;
  void make_folder(const std::string& path) override;
  void sync_folder(const std::string& path) override;
  void rename(const std::string& from, const std::string& to) override;
  bool exchange(const std::string& one, const std::string& other) override;
  void remove_file(const std::string& path) override;
  void remove_folder(const std::string& path) override;
  std::optional<Kind> kind(const std::string& path) override;
  bool is_link(const std::string&) override {
    return false;
  }
  std::vector<std::string> list(const std::string& path) override;

 private:
  std::shared_ptr<Node> find(const std::string& path) const;
  std::shared_ptr<Node> must_find(const std::string& path, bool is_folder) const;
  /// Changes entries of one folder, in one step.
  void change(const std::string& folder, std::map<std::string, std::shared_ptr<Node>> entries);

  std::shared_ptr<Node> root_;
};

} // namespace shardwise::test
