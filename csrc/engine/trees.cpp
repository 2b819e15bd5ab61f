#include "engine/trees.h"

#include "engine/schedule.h"
#include "engine/unit.h"

#include <c10/util/StringUtil.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <set>
#include <unordered_map>

namespace shardwise::engine {
namespace {

/// Trees by address. Those that are gone are forgotten now and then, so that a model of many units is made in no more
/// time a unit than one of few.
class Trees {
 public:
  void add(const std::shared_ptr<Schedule>& tree) {
    trees_[tree.get()] = tree;
    if (trees_.size() < many_) return;
    alive();
    many_ = 2 * trees_.size() + kFew;
  }

  std::vector<std::shared_ptr<Schedule>> alive() {
    std::vector<std::shared_ptr<Schedule>> alive;
    std::erase_if(trees_, [&](const auto& entry) {
      auto tree = entry.second.lock();
      const bool gone = !tree;
      if (!gone) alive.push_back(std::move(tree));
      return gone;
    });
    return alive;
  }

 private:
  static constexpr size_t kFew = 16;
  std::unordered_map<const Schedule*, std::weak_ptr<Schedule>> trees_;
  size_t many_ = kFew;
};

/// The trees with units on a process group, which is one rank's: ranks may be threads.
struct TreeTable {
  std::mutex mutex;
  std::unordered_map<const void*, Trees> trees;

  static TreeTable& get() {
    static auto* table = new TreeTable;
    return *table;
  }
};

using Units = std::vector<const Unit*>;

std::map<comm::Agreement*, Units> by_agreement(const std::vector<std::shared_ptr<Unit>>& units) {
  std::map<comm::Agreement*, Units> result;
  for (const auto& unit : units) {
    if (unit->agreement()) result[unit->agreement().get()].push_back(unit.get());
  }
  return result;
}

std::set<const void*> process_groups(const std::vector<std::shared_ptr<Unit>>& units) {
  std::set<const void*> groups;
  for (const auto& unit : units) {
    if (!unit->agreement()) continue;
    for (const auto& axis : unit->axes()) {
      if (axis.size() > 1) groups.insert(axis.identity());
    }
  }
  return groups;
}

bool sums(const Unit& unit) {
  return unit.takes_part() && unit.options.sync;
}

std::string describe(const Units& units) {
  std::string with;
  std::string without;
  for (const auto* unit : units) {
    auto& names = sums(*unit) ? with : without;
    names += c10::str(names.empty() ? "'" : ", '", unit->name(), "'");
  }
  if (with.empty()) return "a backward that sums no gradients (units " + without + ")";
  const auto rest = without.empty() ? "" : ", but not of " + without;
  return "a backward that sums the gradients of units " + with + rest;
}

/// Below those that have a meaning of their own, above the smallest numbers.
int64_t event_of(const Units& units) {
  uint64_t hash = 14695981039346656037ULL;
  for (const auto* unit : units) {
    const auto word = 4 * static_cast<uint64_t>(unit->number_for_all()) + (sums(*unit) ? 1 : 0) +
                      (sums(*unit) && unit->options.all_reduce ? 2 : 0);
    hash = (hash ^ word) * 1099511628211ULL;
  }
  return comm::Agreement::kWrapping - 1 - static_cast<int64_t>(hash / 4);
}

} // namespace

void agree_on_sums(const std::vector<std::shared_ptr<Unit>>& units) {
  // In the order of the trees' units, which is the same on all ranks; that of addresses is not.
  auto groups = by_agreement(units);
  for (const auto& unit : units) {
    const auto group = groups.find(unit->agreement().get());
    if (group == groups.end()) continue;
    const auto text = [&] { return describe(group->second); };
    group->first->enter(comm::Agreement::group, event_of(group->second), text, unit->own_counters());
    groups.erase(group);
  }
}

void add_to_tree(const Unit& unit, const std::shared_ptr<Schedule>& tree) {
  if (!unit.agreement()) return;
  auto& table = TreeTable::get();
  const std::lock_guard lock(table.mutex);
  bool is_new = false;
  for (const auto& axis : unit.axes()) {
    if (axis.size() == 1) continue;
    const auto [entry, made] = table.trees.try_emplace(axis.identity());
    entry->second.add(tree);
    is_new = is_new || made;
  }
  if (!is_new) return;
  for (auto entry = table.trees.begin(); entry != table.trees.end();) {
    entry = entry->second.alive().empty() ? table.trees.erase(entry) : std::next(entry);
  }
}

std::vector<std::shared_ptr<Schedule>> trees_beside(const std::vector<std::shared_ptr<Unit>>& units) {
  std::vector<std::shared_ptr<Schedule>> trees;
  {
    auto& table = TreeTable::get();
    const std::lock_guard lock(table.mutex);
    for (const auto* group : process_groups(units)) {
      for (auto& tree : table.trees[group].alive()) trees.push_back(std::move(tree));
    }
  }
  std::sort(trees.begin(), trees.end(), [](const auto& a, const auto& b) { return a->number() < b->number(); });
  trees.erase(std::unique(trees.begin(), trees.end()), trees.end());
  return trees;
}

} // namespace shardwise::engine
