#include "transport/issue_count.h"

#include <map>
#include <mutex>

namespace shardwise::transport {
namespace {

/// All counts in this process. Never destroyed: a process group may outlive any static object.
struct Counts {
  std::mutex mutex;
  std::multimap<uint64_t, const IssueCount*> all;

  static Counts& get() {
    static auto* counts = new Counts;
    return *counts;
  }
};

} // namespace

IssueCount::IssueCount(uint64_t group) : group_(group) {
  auto& counts = Counts::get();
  const std::lock_guard lock(counts.mutex);
  counts.all.emplace(group, this);
}

IssueCount::~IssueCount() {
  auto& counts = Counts::get();
  const std::lock_guard lock(counts.mutex);
  std::erase_if(counts.all, [this](const auto& entry) { return entry.second == this; });
}

uint64_t IssueCount::next() {
  thread_ = std::this_thread::get_id();
  return ++count_;
}

std::optional<uint64_t> IssueCount::of(uint64_t group) {
  auto& counts = Counts::get();
  const std::lock_guard lock(counts.mutex);
  const auto [first, last] = counts.all.equal_range(group);
  const bool only = first != last && std::next(first) == last;
  for (auto entry = first; entry != last; ++entry) {
    if (only || entry->second->thread_ == std::this_thread::get_id()) return entry->second->count_.load();
  }
  return std::nullopt;
}

} // namespace shardwise::transport
