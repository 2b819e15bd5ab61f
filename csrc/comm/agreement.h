#pragma once

#include "base/forked.h"
#include "comm/axis_group.h"
#include "comm/notes.h"
#include "comm/processes.h"
#include "comm/waiter.h"
#include "transport/transport.h"

#include <shardwise/counters.h>
#include <shardwise/export.h>

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <array>
#include <chrono>
#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

namespace shardwise::comm {

/// That the ranks of a mesh issue the same collectives in the same order. It is asked before each of them: a
/// rank that goes another way than the others raises an Error that names both ways, and so do all others, where c10d
/// would mix up their data, hang, or end the process.
///
/// What follows what is learnt: a step from one event to the next that was the only one so far costs a look at a table.
/// Any other is compared with all ranks first, over process groups of its own. A rank on a known way does not compare;
/// when its own collective takes long, it looks at the notes that ranks leave in their groups' stores while they
/// compare or wait long themselves: whoever waits for a rank that cannot come joins the comparison. So does a rank that
/// waits in a collective of the program's own on our transport, for one that waits here.
///
/// Waits have the limit of the mesh's process groups, and a rank whose process ends, or that failed, ends them sooner.
///
/// Belongs to the thread that trains, like the units that use it.
class SHARDWISE_API Agreement : public transport::Onlooker, public std::enable_shared_from_this<Agreement> {
 public:
  /// What is issued in one order: on the process group of the mesh's last axis, on the second one that a mesh has of
  /// the same ranks, or on the process group of its first axis, where it has two.
  enum Chain : uint8_t { group, second_group, first_axis };
  static constexpr size_t kChains = 3;

  /// Events of units are not negative, and those of backwards are below kWrapping; these are no unit's.
  static constexpr int64_t kWrapping = -2;
  static constexpr int64_t kClipping = std::numeric_limits<int64_t>::min();
  static constexpr int64_t kState = kClipping + 1;

  /// A collective's place in the order; of none when nobody checks.
  struct Place {
    std::shared_ptr<Agreement> agreement;
    Chain chain = group;
    /// kUnnumbered: in no order, so that its wait tells nothing about the order of others.
    int64_t number = kUnnumbered;
  };
  static constexpr int64_t kUnnumbered = -1;

  /// The one of the ranks that these lines reach, made at the first call, which all ranks make together. Null for a
  /// world of one and where a group has no store that works: nothing is checked there. Raises PeerError.
  static std::shared_ptr<Agreement> of(const std::vector<AxisGroup>& lines);
  /// The one that was made; null where none was.
  static std::shared_ptr<Agreement> known(const std::vector<AxisGroup>& lines);
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
  /// All ranks come here, now: for what is rare, so that it is no step of any way that is learnt.
  void meet(int64_t event, const std::string& text, Counters& counters);

  /// The collective at this place, `what`, takes long. Raises an Error when another rank is on another way, and
  /// PeerError when one of its ranks is gone or failed.
  void look(const Place& place, const std::string& what);
  /// The same of what is in no order, as process groups that all ranks make.
  void look_beside(const std::string& what);
  /// The collective at this place failed, and why: nothing can be issued any more, and the other ranks hear of it.
  /// Raises PeerError.
  [[noreturn]] void fail(const Place& place, const std::string& text);
  /// The same of what is in no order.
  [[noreturn]] void fail_beside(const std::string& text) {
    raise_peer_error(text);
  }
  /// Nothing can be issued any more.
  bool broken() const {
    return !broken_.empty();
  }
  /// What a wait may take.
  std::chrono::milliseconds timeout() const {
    return timeout_;
  }
  Waiter& waiter() {
    return waiter_;
  }

  void look_at(const transport::OwnCall& call) override;

 private:
  struct Record;
  struct Note;
  struct OrderHistory {
    int64_t last = -1;
    int64_t issued = 0;
    /// The events that came after an event so far.
    std::unordered_map<int64_t, std::vector<int64_t>> next;
  };

  /// What it has along one line.
  struct Channel {
    c10::intrusive_ptr<c10d::Backend> control;
    c10::intrusive_ptr<c10d::Store> store;
    Ranks ranks;
    Processes processes;
  };

  /// How often it looks: sooner at first.
  struct Looking {
    std::vector<uint8_t> note;
    std::chrono::steady_clock::time_point next;
    std::chrono::milliseconds pause{0};
  };

  Agreement(std::vector<Channel> channels, std::chrono::milliseconds timeout);
  void require_unbroken() const;
  void compare(Chain chain, int64_t event, const std::string& text);
  std::vector<Record> exchange(Record mine);
  void wait_in_exchange(c10d::Work& work, size_t line, const Record& mine);
  [[noreturn]] void join(Record mine, const std::string& what);
  [[noreturn]] void raise(const std::vector<Record>& records);
  [[noreturn]] void raise_peer_error(const std::string& text);
  void require_alive(size_t line, const std::string& what);
  void require_no_failure(const Note& note, const std::string& what);
  int64_t rank() const;
  /// Where the program's own calls are seen.
  void belong_to_this_thread();
  /// The number of the channel to the ranks that a chain's collectives are with.
  size_t line_of(int64_t chain) const;
  std::array<int64_t, kChains> positions() const;
  /// Tells the others, and gives what they had to tell.
  std::vector<std::pair<size_t, Note>> tell(Note mine);
  void let_go_of_channels();

  int64_t forks_ = base::forks();
  std::vector<Channel> channels_;
  const int64_t rank_;
  Notes notes_;
  const std::chrono::milliseconds timeout_;
  std::array<OrderHistory, kChains> histories_;
  int64_t next_number_ = 0;
  /// Comparisons so far; all ranks count alike.
  int64_t compared_ = 0;
  /// Ranks went apart, as this one knows: whoever waits has to join the comparison.
  bool apart_ = false;
  Looking looking_;
  /// When the end of a process was first seen.
  std::optional<std::chrono::steady_clock::time_point> ended_since_;
  std::thread::id thread_;
  Waiter waiter_;
  /// Why nothing can be issued any more: collectives of some ranks are under way that others will not join.
  std::string broken_;
  bool by_peer_ = false;
};

} // namespace shardwise::comm
