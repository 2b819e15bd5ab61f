#pragma once

#include "base/forked.h"
#include "comm/agree/agreement.h"
#include "transport/transport.h"

#include <shardwise/counters.h>
#include <shardwise/detail/export.h>

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <concepts>
#include <functional>
#include <future>
#include <string>

namespace shardwise::observe {
class Span;
}

namespace shardwise::comm {

/// The name of a collective in errors: a text, or a function that makes it on demand, since most collectives do not
/// fail.
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

/// A collective in flight. Without a work it is already done. If it ends without a wait in a stream, the destructor
/// makes the stream wait, so its memory may be freed afterwards.
class SHARDWISE_API Pending {
 public:
  /// If `position` has an agreement, a long wait asks it whether the other ranks come. `in_stream`: on a device, where
  /// wait() makes the stream wait, not the host.
  Pending(
      c10::intrusive_ptr<c10d::Work> work, CollectiveName what, int64_t rank, Agreement::Position position = {},
      bool in_stream = false);
  Pending(Pending&&) = default;
  Pending& operator=(Pending&&) = default;
  ~Pending();
  /// Raises PeerError with the name of the collective and this rank, or the agreement's Error.
  void wait();
  /// Whether wait() would return at once.
  bool done() const;
  /// wait() for a result that nobody needs any more: returns whether it succeeded, and never raises.
  bool wait_noexcept() noexcept;

 private:
  friend class Collectives;
  bool wait_and_check_peers();

  c10::intrusive_ptr<c10d::Work> work_;
  CollectiveName what_;
  int64_t rank_;
  Agreement::Position position_;
  bool in_stream_;
  bool waited_ = false;
  /// For a work whose wait() ignores timeouts and that does not say whether it is done, as some of Gloo's do not: ready
  /// when a wait in the background has ended. Else it has no state.
  std::future<void> ended_;
  /// Set while a record is on.
  std::shared_ptr<observe::Span> span_;
};

/// The user's own all-gather or reduce-scatter of an input into an output. Returns null if the output is complete.
using Custom = std::function<c10::intrusive_ptr<c10d::Work>(at::Tensor&, at::Tensor&, c10d::ProcessGroup&)>;

/// The collectives of one process group, issued only through c10d::ProcessGroup, so that profilers, CommDebugMode and
/// the user's own back ends see them. All tensors are contiguous. Every call is counted. `what` names it in errors.
class SHARDWISE_API Collectives {
 public:
  /// For a rank that is alone: it must issue no collectives.
  Collectives() = default;
  explicit Collectives(AxisGroup line);

  int rank() const {
    return rank_;
  }
  int size() const {
    return size_;
  }
  /// The same value for all Collectives of one process group.
  const void* identity() const {
    return line_.group.get();
  }
  /// The rank numbers that errors show.
  Ranks names() const {
    return line_.ranks;
  }
  /// A copy whose collectives are at this position in the order. If the position is unnumbered it may serve for
  /// several: their waits then end if a rank is gone.
  Collectives at(Agreement::Position position) const;
  /// A copy that uses the user's own all-gathers or reduce-scatters, unless `custom` is empty.
  Collectives by(Custom custom) const;
  /// A copy whose tensors are to lie in memory of its process group.
  Collectives in_own_memory() const;
  /// Itself if its tensors are to lie there; else null.
  const Collectives* memory() const {
    return in_own_memory_ ? this : nullptr;
  }
  /// Whether the process group has memory for collectives on tensors of this device.
  bool has_memory(at::Device device) const;
  /// Such memory, as bytes: zeros, which the process group may have registered with the network.
  at::Tensor allocate(int64_t bytes, at::Device device) const;

  /// Whether both use the same process group.
  bool operator==(const Collectives& other) const {
    return line_.group == other.line_.group;
  }

  /// Reduces in place; a sum by default.
  Pending all_reduce(
      const at::Tensor& tensor, CollectiveName what, Counters& counters,
      c10d::ReduceOp::RedOpType op = c10d::ReduceOp::SUM) const;
  /// Overwrites with the root's values.
  Pending broadcast(const at::Tensor& tensor, int root, CollectiveName what, Counters& counters) const;
  /// Fills row k of `output` with rank k's `tensor`. With a placement, which is read before this returns, `output` gets
  /// only what has no range there.
  Pending all_gather(
      const at::Tensor& output, const at::Tensor& tensor, CollectiveName what, Counters& counters,
      const transport::DirectPlacement* placement = nullptr) const;
  /// Whether waits for collectives on tensors of this device make its stream wait, and not the host.
  bool wait_in_stream(at::Device device) const;
  /// Whether all-gathers accept a placement: those of CPU tensors over the direct transport do.
  bool can_place() const;
  /// Each rank's `tensor` has size() parts. Fills `output` with the sum of part rank() over all ranks.
  Pending reduce_scatter(
      const at::Tensor& output, const at::Tensor& tensor, CollectiveName what, Counters& counters) const;

 private:
  /// Issues `call`, counts it in `calls`, and records it as `kind`.
  template <typename Call>
  Pending launch(
      const char* kind, const Call& call, const at::Tensor& tensor, CollectiveName what, int64_t& calls,
      Counters& counters) const;

  AxisGroup line_;
  int rank_ = 0;
  int size_ = 1;
  Agreement::Position position_;
  Custom custom_;
  bool in_own_memory_ = false;
  int64_t forks_ = base::forks();
};

} // namespace shardwise::comm
