#pragma once

#include "base/forked.h"
#include "comm/agreement.h"
#include "transport/transport.h"

#include <shardwise/counters.h>
#include <shardwise/export.h>

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <concepts>
#include <functional>
#include <string>

namespace shardwise::observe {
class Span;
}

namespace shardwise::comm {

/// Names a collective in errors: a text, or what makes it, for most collectives do not fail.
class CollectiveName {
 public:
  CollectiveName(std::string text) : make_([text = std::move(text)] { return text; }) {}
  CollectiveName(const char* text) : CollectiveName(std::string(text)) {}
  template <std::invocable Make>
  CollectiveName(Make make) : make_(std::move(make)) {}
  std::string operator()() const {
    return make_();
  }

 private:
  std::function<std::string()> make_;
};

/// A collective under way; one without a work is done.
class SHARDWISE_API Pending {
 public:
  /// While one with a place takes long, the others are asked whether they come. `in_stream`: on a device, where the
  /// stream waits, and the host never does.
  Pending(
      c10::intrusive_ptr<c10d::Work> work, CollectiveName what, int64_t rank, Agreement::Place place = {},
      bool in_stream = false);
  /// Raises PeerError with the name of the collective and this rank, or the agreement's Error.
  void wait();
  /// Whether wait() would return at once.
  bool done() const;
  /// The same where nobody wants the result any more: returns whether it ended well, and raises nothing.
  bool settle() noexcept;

 private:
  friend class Collectives;
  bool wait_and_look();

  c10::intrusive_ptr<c10d::Work> work_;
  CollectiveName what_;
  int64_t rank_;
  Agreement::Place place_;
  bool in_stream_;
  /// Of a work whose own wait knows no timeout, and that does not tell whether it is done.
  std::shared_ptr<Waiter::Ticket> ticket_;
  /// Where events are recorded.
  std::shared_ptr<observe::Span> span_;
};

/// As ProcessGroup's own, of the user's: null when the output is complete.
using Custom = std::function<c10::intrusive_ptr<c10d::Work>(at::Tensor&, at::Tensor&, c10d::ProcessGroup&)>;

/// The collectives of one process group, issued through c10d::ProcessGroup alone, so that profilers, CommDebugMode and
/// users' own back ends see them. All tensors are contiguous. Every call is counted. `what` names it in errors.
class SHARDWISE_API Collectives {
 public:
  /// Of a rank that is alone: it must issue none.
  Collectives() = default;
  explicit Collectives(AxisGroup line);

  int rank() const;
  int size() const;
  /// The same for all of one process group.
  const void* identity() const {
    return line_.group.get();
  }
  /// CollectiveName errors call the ranks.
  Ranks names() const {
    return line_.ranks;
  }
  /// The same for a collective at this place of the order; at one without a number, for all, so that waits end where a
  /// rank is gone.
  Collectives at(Agreement::Place place) const;
  /// The same with all-gathers and reduce-scatters of the user's own, unless that is empty.
  Collectives by(Custom custom) const;

  /// Whether both are of one process group.
  bool operator==(const Collectives& other) const {
    return line_.group == other.line_.group;
  }

  /// Reduces in place: sums, unless told otherwise.
  Pending all_reduce(
      const at::Tensor& tensor, CollectiveName what, Counters& counters,
      c10d::ReduceOp::RedOpType op = c10d::ReduceOp::SUM) const;
  /// Overwrites with the root's values.
  Pending broadcast(const at::Tensor& tensor, int root, CollectiveName what, Counters& counters) const;
  /// Fills row k of `output` with rank k's `tensor`; but for the ranges of a placement, where there is one. The
  /// placement is read before this returns.
  Pending all_gather(
      const at::Tensor& output, const at::Tensor& tensor, CollectiveName what, Counters& counters,
      const transport::DirectPlacement* placement = nullptr) const;
  /// Whether an all-gather takes a placement: those of tensors on CPUs do, by the direct transport.
  bool can_place() const;
  /// Fills `output` with the sum over ranks of part number rank() of their `tensor`, which has size() parts.
  Pending reduce_scatter(
      const at::Tensor& output, const at::Tensor& tensor, CollectiveName what, Counters& counters) const;

 private:
  /// Counted under `calls` and recorded as a `kind`.
  template <typename Call>
  Pending launch(
      const char* kind, const Call& call, const at::Tensor& tensor, CollectiveName what, int64_t& calls,
      Counters& counters) const;

  AxisGroup line_;
  Agreement::Place place_;
  Custom custom_;
  int64_t forks_ = base::forks();
};

} // namespace shardwise::comm
