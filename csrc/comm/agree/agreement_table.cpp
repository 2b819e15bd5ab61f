// Finds the agreement of given process groups.
#include "comm/agree/agreement.h"

#include "comm/meet/making_watch.h"
#include "comm/meet/patience.h"
#include "comm/meet/second_group.h"

#include <c10/util/StringUtil.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <algorithm>
#include <mutex>

namespace shardwise::comm {
namespace {

using Groups = std::vector<c10::weak_intrusive_ptr<c10d::ProcessGroup>>;

/// The agreements of the process groups that still exist.
struct AgreementTable {
  struct Entry {
    Groups groups;
    std::shared_ptr<Agreement> agreement;

    bool expired() const {
      return std::any_of(groups.begin(), groups.end(), [](const auto& group) { return group.expired(); });
    }
    bool is_of(const std::vector<AxisGroup>& lines) const {
      const auto same = [](const auto& a, const AxisGroup& b) { return a._unsafe_get_target() == b.group.get(); };
      return std::equal(groups.begin(), groups.end(), lines.begin(), lines.end(), same);
    }
  };
  std::mutex mutex;
  std::vector<Entry> entries;

  std::shared_ptr<Agreement> find(const std::vector<AxisGroup>& lines) {
    // Agreements of groups that are gone are destroyed after the lock is released, because closing connections takes a
    // while.
    std::vector<std::shared_ptr<Agreement>> ended;
    const std::lock_guard lock(mutex);
    std::erase_if(entries, [&](const Entry& entry) {
      if (!entry.expired()) return false;
      ended.push_back(entry.agreement);
      return true;
    });
    for (const auto& entry : entries) {
      if (entry.is_of(lines)) return entry.agreement;
    }
    return nullptr;
  }

  static AgreementTable& get() {
    static auto* table = new AgreementTable;
    return *table;
  }
};

/// The lines with more than one rank.
std::vector<AxisGroup> of_several(std::vector<AxisGroup> lines) {
  std::erase_if(lines, [](const AxisGroup& line) { return line.group->getSize() == 1; });
  return lines;
}

std::chrono::milliseconds timeout_of(const AxisGroup& line) {
  return comm::timeout_of(*line.group).value_or(kBackendDefaultTimeout);
}

/// Whether ranks can meet in the store of this group. The one of torch's fake process group accepts everything and
/// keeps nothing.
bool works(const AxisGroup& line) {
  const auto store = line.group->getStore();
  if (!store) return false;
  try {
    const auto key = c10::str("shardwise ", line.group->getRank());
    return patiently(timeout_of(line), nullptr, [store, key] {
      store->set(key, std::string("works"));
      return store->get_to_str(key) == "works";
    });
  } catch (const std::exception&) {
    return false;
  }
}

} // namespace

std::shared_ptr<Agreement> Agreement::known(const std::vector<AxisGroup>& lines) {
  return AgreementTable::get().find(of_several(lines));
}

std::shared_ptr<Agreement> Agreement::of(const std::vector<AxisGroup>& all_lines) {
  const auto lines = of_several(all_lines);
  if (auto found = AgreementTable::get().find(lines)) return found;
  if (lines.empty() || !std::all_of(lines.begin(), lines.end(), works)) return nullptr;
  const auto purpose = c10::str("shardwise agreement of ", lines.size(), " axes");
  MakingWatch watch(lines, purpose);
  std::vector<Channel> channels;
  Groups groups;
  auto limit = timeout_of(lines.front());
  for (const auto& line : lines) {
    const auto& [group, ranks] = line;
    limit = std::min(limit, timeout_of(line));
    std::vector<int64_t> names;
    for (int position = 0; position < group->getSize(); ++position) names.push_back(ranks[position]);
    const auto store = c10::make_intrusive<c10d::PrefixStore>(purpose, group->getStore());
    const auto made = watch.over([&] {
      return make_beside(
          *group, ranks,
          {.name = purpose,
           .store = store,
           .rank = group->getRank(),
           .size = group->getSize(),
           .device = at::kCPU,
           .connect_timeout = timeout_of(line),
           .timeout = timeout_of(line),
           .transport = Transport::gloo,
           .names = std::move(names),
           .look = [&watch] { watch.look(); }});
    });
    // Uses the back end directly, so that tools that count collectives do not see these.
    channels.push_back({made.group->getBackend(c10::DeviceType::CPU), made.group->getStore(), ranks, made.processes});
    groups.emplace_back(group);
  }
  std::shared_ptr<Agreement> made(new Agreement(std::move(channels), limit));
  auto& table = AgreementTable::get();
  const std::lock_guard lock(table.mutex);
  table.entries.push_back({std::move(groups), made});
  return made;
}

void Agreement::forget(const c10d::ProcessGroup& group) {
  auto& table = AgreementTable::get();
  const std::lock_guard lock(table.mutex);
  std::erase_if(table.entries, [&](const AgreementTable::Entry& entry) {
    const auto is_it = [&](const auto& other) { return other._unsafe_get_target() == &group; };
    if (std::none_of(entry.groups.begin(), entry.groups.end(), is_it)) return false;
    entry.agreement->broken_ = "shardwise: the mesh of this unit was shut down, so the unit cannot be used any more.";
    for (auto& channel : entry.agreement->channels_) channel.control.reset();
    return true;
  });
}

} // namespace shardwise::comm
