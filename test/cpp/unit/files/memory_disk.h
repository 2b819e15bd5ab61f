#pragma once

#include "files/disk.h"

#include <algorithm>
#include <cerrno>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace shardwise::test {

/// A disk in memory that forgets what it may. After a loss of power a file that was not synced has any beginning of
/// what was written, or nothing, or zeros; and a folder has made any of the changes since it was synced, each of them
/// whole, but none to a name whose last change is lost.
class MemoryDisk final : public files::Disk {
  struct Node;
  using Entries = std::map<std::string, std::shared_ptr<Node>>;

 public:
  MemoryDisk() = default;
  MemoryDisk(const MemoryDisk&) = delete;

  /// A disk with the same content, all of it durable.
  std::unique_ptr<MemoryDisk> copy() const {
    auto result = std::make_unique<MemoryDisk>();
    result->root_ = copy_of(*root_);
    result->can_exchange = can_exchange;
    return result;
  }
  /// What is left after a loss of power; the seed chooses.
  void lose_power(uint64_t seed) {
    std::mt19937_64 random(seed);
    forget(*root_, random);
  }
  /// A file's content, to be changed by the test.
  std::string& content(const std::string& path) {
    return must_find(path, false)->content;
  }
  /// Whether folders can change places in one step.
  bool can_exchange = true;

  std::unique_ptr<files::DiskFile> create(const std::string& path) override {
    return std::make_unique<File>(make(path, false));
  }
  std::unique_ptr<files::DiskFile> open(const std::string& path) override {
    return std::make_unique<File>(must_find(path, false));
  }
  void make_folder(const std::string& path) override {
    make(path, true);
  }
  void sync_folder(const std::string& path) override {
    const auto node = must_find(path, true);
    node->durable = node->entries;
    node->changes.clear();
  }
  void rename(const std::string& from, const std::string& to) override {
    if (files::folder_of(from) != files::folder_of(to)) throw files::DiskError("renaming " + from, EXDEV);
    auto node = find(from);
    if (!node) throw files::DiskError("renaming " + from, ENOENT);
    const auto there = find(to);
    if (there && there->is_folder && !there->entries.empty()) throw files::DiskError("renaming to " + to, ENOTEMPTY);
    change(from, {{files::name_of(from), nullptr}, {files::name_of(to), node}});
  }
  bool exchange(const std::string& one, const std::string& other) override {
    if (!can_exchange) return false;
    const auto first = must_find(one, true);
    change(one, {{files::name_of(one), must_find(other, true)}, {files::name_of(other), first}});
    return true;
  }
  void remove_file(const std::string& path) override {
    must_find(path, false);
    change(path, {{files::name_of(path), nullptr}});
  }
  void remove_folder(const std::string& path) override {
    if (!must_find(path, true)->entries.empty()) throw files::DiskError("removing " + path, ENOTEMPTY);
    change(path, {{files::name_of(path), nullptr}});
  }
  std::optional<Kind> kind(const std::string& path) override {
    const auto node = find(path);
    if (!node) return {};
    return node->is_folder ? Kind::folder : Kind::file;
  }
  bool is_link(const std::string&) override {
    return false;
  }
  std::vector<std::string> list(const std::string& path) override {
    std::vector<std::string> names;
    for (const auto& [name, node] : must_find(path, true)->entries) names.push_back(name);
    return names;
  }

 private:
  struct Node {
    bool is_folder = false;
    std::string content = {};
    bool is_synced = false;
    Entries entries = {};
    Entries durable = {};
    /// What changed since the last sync: names, and what lies there now, nothing where it was removed.
    std::vector<Entries> changes = {};
  };

  class File final : public files::DiskFile {
   public:
    explicit File(std::shared_ptr<Node> node) : node_(std::move(node)) {}

    size_t write(files::Bytes bytes) override {
      node_->content.append(reinterpret_cast<const char*>(bytes.data()), bytes.size());
      node_->is_synced = false;
      return bytes.size();
    }
    size_t read(std::span<std::byte> bytes, int64_t offset) override {
      const auto& content = node_->content;
      if (offset >= static_cast<int64_t>(content.size())) return 0;
      return content.copy(reinterpret_cast<char*>(bytes.data()), bytes.size(), static_cast<size_t>(offset));
    }
    int64_t size() override {
      return static_cast<int64_t>(node_->content.size());
    }
    void sync() override {
      node_->is_synced = true;
    }

   private:
    std::shared_ptr<Node> node_;
  };

  static void apply_change(Entries& entries, const Entries& change) {
    for (const auto& [name, node] : change) {
      if (node) {
        entries[name] = node;
      } else {
        entries.erase(name);
      }
    }
  }

  /// What a loss of power leaves of this node and those below.
  static void forget(Node& node, std::mt19937_64& random) {
    if (!node.is_folder) {
      if (!node.is_synced) {
        auto& content = node.content;
        const auto kept = content.empty() ? 0 : random() % (content.size() + 1);
        const auto kind = random() % 4;
        if (kind == 0) content.clear();
        if (kind == 1) content.resize(kept);
        if (kind == 2) std::fill(content.begin() + static_cast<ptrdiff_t>(kept), content.end(), '\0');
      }
      node.is_synced = true;
      return;
    }
    std::set<std::string> lost;
    const auto odds = 1 + random() % 4;
    for (const auto& change : node.changes) {
      const bool builds_on_lost =
          std::any_of(change.begin(), change.end(), [&](const auto& entry) { return lost.contains(entry.first); });
      if (!builds_on_lost && random() % odds == 0) {
        apply_change(node.durable, change);
      } else {
        for (const auto& [name, entry] : change) lost.insert(name);
      }
    }
    node.changes.clear();
    node.entries = node.durable;
    for (auto& [name, entry] : node.entries) forget(*entry, random);
  }

  static std::shared_ptr<Node> copy_of(const Node& node) {
    auto result = std::make_shared<Node>(Node{.is_folder = node.is_folder, .content = node.content, .is_synced = true});
    for (const auto& [name, entry] : node.entries) result->entries[name] = copy_of(*entry);
    result->durable = result->entries;
    return result;
  }

  std::shared_ptr<Node> find(const std::string& path) const {
    if (path == "." || path == "/") return root_;
    const auto folder = find(files::folder_of(path));
    if (!folder || !folder->is_folder) return nullptr;
    const auto entry = folder->entries.find(files::name_of(path));
    return entry == folder->entries.end() ? nullptr : entry->second;
  }
  std::shared_ptr<Node> must_find(const std::string& path, bool is_folder) const {
    auto node = find(path);
    if (!node) throw files::DiskError("finding " + path, ENOENT);
    if (node->is_folder != is_folder) throw files::DiskError("using " + path, is_folder ? ENOTDIR : EISDIR);
    return node;
  }
  std::shared_ptr<Node> make(const std::string& path, bool is_folder) {
    if (find(path)) throw files::DiskError("making " + path, EEXIST);
    auto node = std::make_shared<Node>(Node{.is_folder = is_folder});
    change(path, {{files::name_of(path), node}});
    return node;
  }
  /// Changes entries of the folder that a path lies in, in one step.
  void change(const std::string& path, Entries entries) {
    const auto node = must_find(files::folder_of(path), true);
    apply_change(node->entries, entries);
    node->changes.push_back(std::move(entries));
  }

  std::shared_ptr<Node> root_ = std::make_shared<Node>(Node{.is_folder = true});
};

} // namespace shardwise::test
