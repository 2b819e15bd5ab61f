#include "engine/trees.h"

#include "base/fingerprint.h"
#include "base/weak_table.h"
#include "engine/schedule.h"
#include "engine/unit.h"

#include <c10/util/StringUtil.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <set>

namespace shardwise::engine {
namespace {

using Trees = base::WeakTable<const Schedule*, Schedule>;

/// The trees that have units on a process group. A process group belongs to one rank, so ranks that are threads do not
/// mix.
struct TreeTable {
  std::mutex mutex;
  std::map<const void*, Trees> trees;

  static TreeTable& get() {
    static auto* table = new TreeTable;
    return *table;
  }
};

using Units = std::vector<const Unit*>;

std::map<comm::Agreement*, Units> by_agreement(const std::vector<std::shared_ptr<Unit>>& units) {
  std::map<comm::Agreement*, Units> result;
  for (const auto& unit : units) {
    if (unit->ranks().agreement()) result[unit->ranks().agreement().get()].push_back(unit.get());
  }
  return result;
}

std::set<const void*> process_groups(const std::vector<std::shared_ptr<Unit>>& units) {
  std::set<const void*> groups;
  for (const auto& unit : units) {
    if (!unit->ranks().agreement()) continue;
    for (const auto& axis : unit->ranks().axes()) {
      if (axis.size() > 1) groups.insert(axis.identity());
    }
  }
  return groups;
}

bool sums(const Unit& unit) {
  return unit.schedule()->takes_part(unit) && unit.options.sync;
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

/// A number for what the words say, below all those with a fixed meaning; `/ 4` keeps it in range.
int64_t event_of(const std::vector<uint64_t>& words) {
  return comm::Agreement::kWrapping - 1 - static_cast<int64_t>(base::fingerprint(words) / 4);
}

int64_t event_of(const Units& units) {
  std::vector<uint64_t> words;
  for (const auto* unit : units) {
    words.push_back(
        4 * static_cast<uint64_t>(unit->number_for_all()) + (sums(*unit) ? 1 : 0) +
        (sums(*unit) && unit->options.all_reduce ? 2 : 0));
  }
  return event_of(words);
}

} // namespace

void agree_on_sums(const std::vector<std::shared_ptr<Unit>>& units) {
  // In the order of the tree's units, which is the same on all ranks; the order of addresses is not.
  auto groups = by_agreement(units);
  for (const auto& unit : units) {
    const auto group = groups.find(unit->ranks().agreement().get());
    if (group == groups.end()) continue;
    const auto text = [&] { return describe(group->second); };
    group->first->enter(comm::Agreement::group, event_of(group->second), text, unit->own_counters());
    groups.erase(group);
  }
}

void compare_started(const std::vector<std::shared_ptr<Unit>>& units, size_t started, const std::string& what) {
  std::set<comm::Agreement*> asked;
  for (const auto& unit : units) {
    const auto& agreement = unit->ranks().agreement();
    if (!agreement || agreement->broken() || !asked.insert(agreement.get()).second) continue;
    const auto last = started == 0 ? "before any sum" : "after the sum of unit '" + units[started - 1]->name() + "'";
    agreement->compare_now(event_of(std::vector<uint64_t>{started}), c10::str(what, ' ', last), unit->own_counters());
  }
}

void add_to_tree(const Unit& unit, const std::shared_ptr<Schedule>& tree) {
  if (!unit.ranks().agreement()) return;
  auto& table = TreeTable::get();
  const std::lock_guard lock(table.mutex);
  bool is_new = false;
  for (const auto& axis : unit.ranks().axes()) {
    if (axis.size() == 1) continue;
    const auto [entry, made] = table.trees.try_emplace(axis.identity());
    entry->second.set(tree.get(), tree);
    is_new = is_new || made;
  }
  if (!is_new) return;
  for (auto entry = table.trees.begin(); entry != table.trees.end();) {
    entry = entry->second.living().empty() ? table.trees.erase(entry) : std::next(entry);
  }
}

std::vector<std::shared_ptr<Schedule>> trees_sharing_groups(const std::vector<std::shared_ptr<Unit>>& units) {
  std::vector<std::shared_ptr<Schedule>> trees;
  {
    auto& table = TreeTable::get();
    const std::lock_guard lock(table.mutex);
    for (const auto* group : process_groups(units)) {
      for (auto& tree : table.trees[group].living()) trees.push_back(std::move(tree));
    }
  }
  std::sort(trees.begin(), trees.end(), [](const auto& a, const auto& b) { return a->number() < b->number(); });
  trees.erase(std::unique(trees.begin(), trees.end()), trees.end());
  return trees;
}

} // namespace shardwise::engine
