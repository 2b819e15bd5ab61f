#pragma once

#include "transport/carrier.h"

#include <cstddef>
#include <span>
#include <vector>

namespace shardwise::transport {

/// Where one rank's data goes on the receiver: pieces of memory, in order.
using Spans = std::vector<std::span<std::byte>>;
/// Writes `bytes` bytes of the data, beginning at `offset` within it.
void fill_spans(const Spans& spans, size_t offset, const std::byte* from, size_t bytes);

/// One collective as this rank calls it, and its time limit.
struct Call {
  Signature signature;
  std::chrono::milliseconds timeout;

  /// The size of Signature::elements.
  size_t bytes() const {
    return static_cast<size_t>(signature.elements) * c10::elementSize(signature.dtype);
  }
  bool is_mean() const {
    return signature.op == c10d::ReduceOp::AVG;
  }
};

/// The range of a tensor that one rank sums; all ranks have the whole tensor.
struct SumRange {
  size_t begin = 0;
  size_t bytes = 0;

  /// Rank `rank`'s share when `bytes` are divided among all ranks in multiples of 64.
  static SumRange of(size_t bytes, int rank, int world);
};

/// Carries out collectives. Pointers are to contiguous tensors of the dtype in Call::signature. One thread uses it, for
/// one collective at a time. Sums are added in an order that is the same in every run.
///
/// Each collective begins by comparing the calls of all ranks: if they differ, all raise c10::DistBackendError with
/// both calls, and may go on.
class Exchange {
 public:
  explicit Exchange(Progress& progress) : progress_(progress) {}
  virtual ~Exchange() = default;
  Exchange(const Exchange&) = delete;
  Exchange& operator=(const Exchange&) = delete;

  /// Does only that, and returns once every rank has made its call.
  virtual void announce(const Call& call) = 0;
  /// Fills each rank's spans with that rank's `input`. This rank's input may already lie in its own place. All ranks
  /// have spans of the same sizes.
  virtual void all_gather(const Call& call, const std::vector<Spans>& places, const std::byte* input) = 0;
  /// Fills `output` with the sum of all ranks' inputs for this rank. `output` may be this rank's own input for itself.
  virtual void reduce_scatter(const Call& call, std::byte* output, const std::vector<const std::byte*>& inputs) = 0;
  /// Sums in place.
  virtual void all_reduce(const Call& call, std::byte* data) = 0;
  /// Whether Gloo's all-reduce is as fast and gives the same bits.
  virtual bool leaves_all_reduce_to_gloo(size_t, at::ScalarType, c10d::ReduceOp::RedOpType) const {
    return false;
  }
  /// Bytes sent to `peer` over the network so far.
  virtual uint64_t sent_to(int /*peer*/) const {
    return 0;
  }
  /// This rank runs no more collectives: peers that wait for it fail at once. Called when it is closed, and after a
  /// failure, before the failed call gives up its memory. May be called again.
  virtual void end() = 0;

  int rank() const {
    return progress_.rank();
  }
  int world() const {
    return progress_.size();
  }

 protected:
  /// Raises c10::DistBackendError if the peer calls something else.
  void compare(const Signature& mine, int peer, const Signature& theirs) const;
  using Terms = std::vector<const std::byte*>;
  /// Adds `bytes` bytes of each of `terms`, as the call says.
  static void sum(const Call& call, std::byte* output, const Terms& terms, size_t bytes);
  /// All other ranks, starting with the next one, so that not all ranks turn to the same peer first.
  std::vector<int> peers() const;

  Progress& progress_;
};

} // namespace shardwise::transport
