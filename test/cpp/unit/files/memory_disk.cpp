#include "unit/files/memory_disk.h"

#include <algorithm>
#include <cerrno>
#include <set>

namespace shardwise::test {

using files::Bytes;
using files::DiskError;
using files::folder_of;
using files::name_of;
using Node = MemoryDisk::Node;

namespace {

class MemoryFile final : public files::DiskFile {
 public:
  explicit MemoryFile(std::shared_ptr<Node> node) : node_(std::move(node)) {}

  size_t write(Bytes bytes) override {
    node_->content.append(reinterpret_cast<const char*>(bytes.data()), bytes.size());
    node_->is_synced = false;
    return bytes.size();
  }
  size_t read(std::span<std::byte> bytes, int64_t offset) override {
    const auto& content = node_->content;
    if (offset >= static_cast<int64_t>(content.size())) return 0;
    const auto count = std::min(bytes.size(), content.size() - offset);
    std::copy_n(reinterpret_cast<const std::byte*>(content.data()) + offset, count, bytes.data());
    return count;
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

using Entries = std::map<std::string, std::shared_ptr<Node>>;

void apply_change(Entries& entries, const Entries& change) {
  for (const auto& [name, node] : change) {
    if (node) {
      entries[name] = node;
    } else {
      entries.erase(name);
    }
  }
}

/// What a loss of power leaves of this node and those below.
void forget(Node& node, std::mt19937_64& random) {
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

std::shared_ptr<Node> copy_of(const Node& node) {
  auto result = std::make_shared<Node>();
  result->is_folder = node.is_folder;
  result->content = node.content;
  result->is_synced = true;
  for (const auto& [name, entry] : node.entries) result->entries[name] = copy_of(*entry);
  result->durable = result->entries;
  return result;
}

std::shared_ptr<Node> new_node(bool is_folder) {
  auto node = std::make_shared<Node>();
  node->is_folder = is_folder;
  return node;
}

} // namespace

MemoryDisk::MemoryDisk() : root_(new_node(true)) {}

std::unique_ptr<MemoryDisk> MemoryDisk::copy() const {
  auto result = std::make_unique<MemoryDisk>();
  result->root_ = copy_of(*root_);
  result->can_exchange = can_exchange;
  return result;
}

void MemoryDisk::lose_power(uint64_t seed) {
  std::mt19937_64 random(seed);
  forget(*root_, random);
}

std::string& MemoryDisk::content(const std::string& path) {
  return must_find(path, false)->content;
}

std::shared_ptr<Node> MemoryDisk::find(const std::string& path) const {
  if (path == "." || path == "/") return root_;
  const auto folder = find(folder_of(path));
  if (!folder || !folder->is_folder) return nullptr;
  const auto entry = folder->entries.find(name_of(path));
  return entry == folder->entries.end() ? nullptr : entry->second;
}

std::shared_ptr<Node> MemoryDisk::must_find(const std::string& path, bool is_folder) const {
  auto node = find(path);
  if (!node) throw DiskError("finding " + path, ENOENT);
  if (node->is_folder != is_folder) throw DiskError("using " + path, is_folder ? ENOTDIR : EISDIR);
  return node;
}

void MemoryDisk::change(const std::string& folder, std::map<std::string, std::shared_ptr<Node>> entries) {
  const auto node = must_find(folder, true);
  apply_change(node->entries, entries);
  node->changes.push_back(std::move(entries));
}

std::unique_ptr<files::DiskFile> MemoryDisk::create(const std::string& path) {
  if (find(path)) throw DiskError("making " + path, EEXIST);
  auto node = new_node(false);
  change(folder_of(path), {{name_of(path), node}});
  return std::make_unique<MemoryFile>(node);
}

std::unique_ptr<files::DiskFile> MemoryDisk::open(const std::string& path) {
  return std::make_unique<MemoryFile>(must_find(path, false));
}

void MemoryDisk::make_folder(const std::string& path) {
  if (find(path)) throw DiskError("making " + path, EEXIST);
  change(folder_of(path), {{name_of(path), new_node(true)}});
}

void MemoryDisk::sync_folder(const std::string& path) {
  const auto node = must_find(path, true);
  node->durable = node->entries;
  node->changes.clear();
}

void MemoryDisk::rename(const std::string& from, const std::string& to) {
  if (folder_of(from) != folder_of(to)) throw DiskError("renaming " + from, EXDEV);
  auto node = find(from);
  if (!node) throw DiskError("renaming " + from, ENOENT);
  const auto there = find(to);
  if (there && there->is_folder && !there->entries.empty()) throw DiskError("renaming to " + to, ENOTEMPTY);
  change(folder_of(from), {{name_of(from), nullptr}, {name_of(to), node}});
}

bool MemoryDisk::exchange(const std::string& one, const std::string& other) {
  if (!can_exchange) return false;
  const auto first = must_find(one, true);
  const auto second = must_find(other, true);
  change(folder_of(one), {{name_of(one), second}, {name_of(other), first}});
  return true;
}

void MemoryDisk::remove_file(const std::string& path) {
  must_find(path, false);
  change(folder_of(path), {{name_of(path), nullptr}});
}

void MemoryDisk::remove_folder(const std::string& path) {
  if (!must_find(path, true)->entries.empty()) throw DiskError("removing " + path, ENOTEMPTY);
  change(folder_of(path), {{name_of(path), nullptr}});
}

std::optional<files::Disk::Kind> MemoryDisk::kind(const std::string& path) {
  const auto node = find(path);
  if (!node) return {};
  return node->is_folder ? Kind::folder : Kind::file;
}

std::vector<std::string> MemoryDisk::list(const std::string& path) {
  std::vector<std::string> names;
  for (const auto& [name, node] : must_find(path, true)->entries) names.push_back(name);
  return names;
}

} // namespace shardwise::test
