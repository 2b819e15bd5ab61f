#pragma once

#include "base/forked.h"
#include "comm/agree/background.h"
#include "comm/agree/notes.h"
#include "comm/mesh/axis_group.h"
#include "comm/rendezvous/processes.h"
#include "transport/transport.h"

#include <shardwise/counters.h>
#include <shardwise/detail/export.h>

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

/// Checks that the ranks of a mesh issue the same collectives in the same order. It is asked before each of them. If
/// ranks differ, all raise an Error that names what they do; without it, c10d would mix up their data, hang, or end the
/// process.
///
/// It learns which event follows which. If an event has had only one successor so far, that successor costs a table
/// lookup. Any other event is first compared with all ranks, over process groups of its own. A rank on a known path
/// does not compare. But ranks that compare or wait long leave notes in the stores of their groups, and ranks that wait
/// long read them: a rank that waits for one that cannot come joins the comparison. So does a rank that waits in one
/// of the program's own collectives on our transport for a rank that waits here.
///
/// Waits end at the timeout of the mesh's process groups, or sooner if a rank's process ends or a rank fails.
///
/// It belongs to the thread that trains, like the units that use it.
class SHARDWISE_API Agreement : public transport::WaitObserver, public std::enable_shared_from_this<Agreement> {
 public:
  /// Each chain has an order of its own: collectives on the process group of the mesh's last axis, those on the second
  /// process group of the same ranks, and those on the process group of the first axis if there are two.
  enum Chain : uint8_t { group, second_group, first_axis };
  static constexpr size_t kChains = 3;

  /// Events of units are not negative; events of backwards are below kWrapping. These belong to no unit.
  static constexpr int64_t kWrapping = -2;
  static constexpr int64_t kClipping = std::numeric_limits<int64_t>::min();
  static constexpr int64_t kState = kClipping + 1;
  static constexpr int64_t kScaling = kClipping + 2;

  /// A collective's position in the order. Without an agreement nothing is checked.
  struct Position {
    std::shared_ptr<Agreement> agreement;
    Chain chain = group;
    /// kUnnumbered: in no order, so that waiting for it says nothing about the order of others.
    int64_t number = kUnnumbered;
  };
  static constexpr int64_t kUnnumbered = -1;

  /// The agreement of the ranks along these lines. The first call makes it, and all ranks make that call together. Null
  /// for a world of one, and if a group has no working store: then nothing is checked. Raises PeerError.
  static std::shared_ptr<Agreement> of(const std::vector<AxisGroup>& lines);
  /// The agreement that of() made; null if there is none.
  static std::shared_ptr<Agreement> known(const std::vector<AxisGroup>& lines);
  /// Whether no other ranks are there: the store of torch's fake process group accepts everything and keeps nothing.
  static bool is_alone(const std::vector<AxisGroup>& lines);
  /// Closes the agreements made for a process group that is closing.
  static void forget(const c10d::ProcessGroup& group);

  /// A number that is the same on all ranks, if all ask in the same order.
  int64_t next_number() {
    return next_number_++;
  }

  /// Call this before issuing a collective. `event` means the same on all ranks; `describe` says what it is, for
  /// errors.
  Position enter(Chain chain, int64_t event, const std::function<std::string()>& describe, Counters& counters);
  /// The same for a collective that always follows one that was compared; nothing is looked up.
  Position pass(Chain chain);
  /// All ranks compare this now. For rare events, which should not become part of the learned order.
  void compare_now(int64_t event, const std::string& text, Counters& counters);

  /// Call this when the collective at `position`, named `what`, takes long. Raises Error if another rank does something
  /// else, and PeerError if a rank is gone or failed.
  void check_peers(const Position& position, const std::string& what);
  /// The same for work outside the order, such as making process groups. It only notices ranks that are gone or failed.
  void check_peers_alive(const std::string& what);
  /// Why the collective at `position` failed, in a sentence: a rank died, or another one failed first. "" if that is
  /// not known.
  std::string cause_of_failure(const Position& position);
  /// Call this when a collective failed, or work outside the order. Nothing can be issued afterwards, and the other
  /// ranks learn why. Raises PeerError.
  [[noreturn]] void fail(const std::string& text);
  /// Whether nothing can be issued any more.
  bool broken() const {
    return !broken_.empty();
  }
  /// The longest that a wait may take.
  std::chrono::milliseconds timeout() const {
    return timeout_;
  }
  /// For waits that may never end.
  Background& background() {
    return background_;
  }

  void still_waiting(const transport::ProgramCall& call) override;

 private:
  struct Record;
  struct Note;
  struct OrderHistory {
    int64_t last = -1;
    int64_t issued = 0;
    /// For each event, those that have followed it so far.
    std::unordered_map<int64_t, std::vector<int64_t>> next;
  };

  /// What it needs along one line of ranks.
  struct Channel {
    c10::intrusive_ptr<c10d::Backend> control;
    c10::intrusive_ptr<c10d::Store> store;
    Ranks ranks;
    Processes processes;
  };

  /// When to ask for notes next; the pauses grow.
  struct NotePolling {
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
  /// Why a connection was lost, beyond what its error says: a process on this host died, or another rank failed first
  /// and left a note before it closed its connections. "" if nothing is known.
  std::string first_cause(size_t line, const Note& mine);
  void require_alive(size_t line, const std::string& what);
  void require_no_failure(const Note& note, const std::string& what);
  /// Makes this thread's waits in the program's own collectives ask this agreement.
  void belong_to_this_thread();
  /// The index of the channel to the ranks that take part in a chain's collectives.
  size_t line_of(int64_t chain) const;
  std::array<int64_t, kChains> positions() const;
  /// Leaves a note for the others, and returns theirs.
  std::vector<std::pair<size_t, Note>> exchange_notes(Note mine);

  int64_t forks_ = base::forks();
  std::vector<Channel> channels_;
  const int64_t rank_;
  Notes notes_;
  const std::chrono::milliseconds timeout_;
  std::array<OrderHistory, kChains> histories_;
  int64_t next_number_ = 0;
  /// Comparisons so far; the same on all ranks.
  int64_t compared_ = 0;
  /// This rank knows that ranks diverged: ranks that wait must join the comparison.
  bool diverged_ = false;
  NotePolling polling_;
  /// When this rank first noticed that a process had ended.
  std::optional<std::chrono::steady_clock::time_point> ended_since_;
  std::thread::id thread_;
  Background background_;
  /// Why nothing can be issued any more. Some ranks may have started collectives that others will never join.
  std::string broken_;
  bool by_peer_ = false;
};

} // namespace shardwise::comm
