#include "base/reason.h"
#include "comm/agree/agreement.h"
#include "comm/agree/notes.h"
#include "comm/mesh/axis_group.h"
#include "comm/rendezvous/call_with_timeout.h"
#include "comm/rendezvous/second_group.h"

#include <shardwise/error.h>

#include <c10/util/StringUtil.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <algorithm>
#include <chrono>
#include <mutex>
#include <string>
#include <vector>

namespace shardwise::comm {
namespace {

// The first byte of a note about a failure. A rank that has not failed leaves a 0, which also replaces what an earlier
// attempt left.
constexpr uint8_t kFailed = 1;

// Long pauses, because one store may serve many ranks; the first comes before anything is asked, so that nothing is if
// all goes well.
constexpr std::chrono::milliseconds kPause{500};
constexpr std::chrono::milliseconds kPausePerRank{20};

std::vector<Notes::Board> boards_of(const std::vector<AxisGroup>& lines, const std::string& purpose) {
  std::vector<Notes::Board> boards;
  for (const auto& [group, ranks] : lines) {
    const auto store = c10::make_intrusive<c10d::PrefixStore>(purpose, group->getStore());
    boards.push_back(note_board(store, "failure", ranks, group->getRank(), group->getSize()));
  }
  return boards;
}

/// Ranks make process groups along one axis of a mesh after the other. A rank that fails will not come to the next
/// axis: it tells the ranks that wait for it there, and they raise its error.
class MakingWatch {
 public:
  /// `purpose` distinguishes its keys from others in the stores.
  MakingWatch(const std::vector<AxisGroup>& lines, const std::string& purpose)
      : rank_(lines.front().ranks[lines.front().group->getRank()]),
        notes_(boards_of(lines, purpose)),
        pause_(kPause),
        next_(std::chrono::steady_clock::now() + pause_) {
    for (const auto& line : lines) pause_ += line.group->getSize() * kPausePerRank;
  }

  /// Returns what `make` returns. If it raises PeerError, the other ranks hear of it.
  template <typename Make>
  auto over(const Make& make) {
    try {
      return make();
    } catch (const PeerError& error) {
      tell(base::reason(error));
      throw;
    }
  }
  /// Raises PeerError if another rank failed.
  void look() {
    const auto now = std::chrono::steady_clock::now();
    if (now >= next_) {
      notes_.leave(mine_);
      next_ = now + pause_;
    }
    for (const auto& [board, note] : notes_.answers_to(mine_)) {
      if (note.empty() || note.front() != kFailed) continue;
      throw PeerError(c10::str(
          "shardwise: rank ", rank_,
          ": the process groups of a mesh could not be made, because another rank failed first: ",
          std::string(note.begin() + 1, note.end())));
    }
  }

 private:
  void tell(const std::string& failure) {
    constexpr std::chrono::milliseconds kTell{500};
    mine_ = {kFailed};
    mine_.insert(mine_.end(), failure.begin(), failure.end());
    notes_.leave(mine_);
    notes_.flush(kTell);
  }

  const int64_t rank_;
  Notes notes_;
  Notes::Bytes mine_{0};
  std::chrono::milliseconds pause_;
  std::chrono::steady_clock::time_point next_;
};

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

/// What the store of this group is good for.
enum class Store : uint8_t { none, ranks_meet_in_it, keeps_nothing };

Store store_of(const AxisGroup& line) {
  const auto store = line.group->getStore();
  if (!store) return Store::none;
  try {
    const auto key = c10::str("shardwise ", line.group->getRank());
    return call_with_timeout(timeout_of(line), nullptr, [store, key] {
      store->set(key, std::string("works"));
      return store->get_to_str(key) == "works" ? Store::ranks_meet_in_it : Store::keeps_nothing;
    });
  } catch (const std::exception&) {
    return Store::none;
  }
}

bool all_are(const std::vector<AxisGroup>& lines, Store kind) {
  const auto is = [kind](const AxisGroup& line) { return store_of(line) == kind; };
  return !lines.empty() && std::all_of(lines.begin(), lines.end(), is);
}

} // namespace

std::shared_ptr<Agreement> Agreement::known(const std::vector<AxisGroup>& lines) {
  return AgreementTable::get().find(of_several(lines));
}

std::shared_ptr<Agreement> Agreement::of(const std::vector<AxisGroup>& all_lines) {
  const auto lines = of_several(all_lines);
  if (auto found = AgreementTable::get().find(lines)) return found;
  if (!all_are(lines, Store::ranks_meet_in_it)) return nullptr;
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
      return make_second_group(
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

bool Agreement::is_alone(const std::vector<AxisGroup>& lines) {
  return all_are(of_several(lines), Store::keeps_nothing);
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
