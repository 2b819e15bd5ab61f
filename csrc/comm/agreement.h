#pragma once

#include "comm/forked.h"
#include "comm/line.h"
#include "comm/waiter.h"

#include <shardwise/counters.h>
#include <shardwise/export.h>

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

namespace shardwise::comm {

/// That the ranks of a mesh issue the same collectives in the same order. It is asked before each of them: a
/// rank that goes another way than the others raises an Error that names both ways, and so do all others, where c10d
/// would mix up their data, hang, or end the process.
///
/// What follows what is learnt: a step from one event to the next that was the only one so far costs a look at a table.
/// Any other is compared with all ranks first, over process groups of its own. A rank on a known way does not compare;
/// when its own collective takes long, it looks at the notes that ranks leave in their groups' stores while they
/// compare or wait long themselves: whoever waits for a rank that cannot come joins the comparison.
///
/// Belongs to the thread that trains, like the units that use it.
class SHARDWISE_API Agreement : public std::enable_shared_from_this<Agreement> {
 public:
  /// What is issued in one order: on the process group of the mesh's last axis, on the second one that a mesh has of
  /// the same ranks, or on the process group of its first axis, where it has two.
  enum Chain : uint8_t { group, second_group, first_axis };
  static constexpr size_t kChains = 3;

  /// A collective's place in the order; of none when nobody checks.
  struct Place {
    std::shared_ptr<Agreement> agreement;
    Chain chain = group;
    int64_t number = 0;
  };

  /// The one of the ranks that these lines reach, made at the first call, which all ranks make together. Null for a
  /// world of one and where a group has no store that works: nothing is checked there.
  static std::shared_ptr<Agreement> of(const std::vector<Line>& lines);
  /// The group is closed: so is what was made for it.
  static void forget(const c10d::ProcessGroup& group);

  /// A number that is the same on every rank, when all ask in the same order.
  int64_t next_number() {
    return next_number_++;
  }

  /// A collective is about to be issued. `event` means the same on all ranks; `describe` tells what it is, for errors.
  Place enter(Chain chain, int64_t event, const std::function<std::string()>& describe, Counters& counters);
  /// The same for one that follows from what was compared before; nothing is looked up.
  Place pass(Chain chain);
  /// The collective at this place, `what`, takes long. Raises an Error when another rank is on another way.
  void look(Chain chain, int64_t number, const std::string& what);
  /// It came after all.
  void stop_looking();
  Waiter& waiter() {
    return waiter_;
  }

 private:
  struct Record;
  struct Note;
  struct Way {
    int64_t last = -1;
    int64_t issued = 0;
    /// The events that came after an event so far.
    std::unordered_map<int64_t, std::vector<int64_t>> next;
  };

  /// What it has along one line.
  struct Channel {
    c10::intrusive_ptr<c10d::Backend> control;
    c10::intrusive_ptr<c10d::Store> notes;
    Ranks ranks;
  };

  explicit Agreement(std::vector<Channel> channels);
  void compare(Chain chain, int64_t event, const std::string& text);
  std::vector<Record> exchange(Record mine);
  [[noreturn]] void raise(const std::vector<Record>& records);
  int64_t rank() const;
  /// The number of the channel to the ranks that a chain's collectives are with.
  size_t line_of(int64_t chain) const;
  std::array<int64_t, kChains> positions() const;
  std::string note_of(int64_t rank) const;
  void leave(const Note& note);

  int64_t forks_ = forks();
  std::vector<Channel> channels_;
  std::array<Way, kChains> ways_;
  int64_t next_number_ = 0;
  /// Comparisons so far; all ranks count alike.
  int64_t compared_ = 0;
  bool left_note_ = false;
  Waiter waiter_;
  /// Why nothing can be issued any more: collectives of some ranks are under way that others will not join.
  std::string broken_;
};

} // namespace shardwise::comm
