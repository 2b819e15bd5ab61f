#pragma once

#include "transport/carrier.h"
#include "transport/spans.h"

#include <cstddef>
#include <functional>
#include <memory>
#include <vector>

namespace shardwise::transport {

/// A collective of this rank: what it is, and the time that it has.
struct Call {
  Signature signature;
  std::chrono::milliseconds timeout;

  /// Of Signature::elements.
  size_t bytes() const {
    return static_cast<size_t>(signature.elements) * c10::elementSize(signature.dtype);
  }
  bool is_mean() const {
    return signature.op == c10d::ReduceOp::AVG;
  }
};

/// The range that a rank sums of a tensor that all ranks have, or of what lies at its beginning.
struct Share {
  size_t begin = 0;
  size_t bytes = 0;

  /// Of `bytes` that are dealt out to all ranks, in multiples of 64.
  static Share of(size_t bytes, int rank, int world);
};

/// Carries out collectives; all ranks sum in the order of the ranks. Memory is that of contiguous tensors of
/// Call::signature's dtype. One thread uses it, for one collective at a time.
///
/// Ranks first compare what they call: if that differs, all raise c10::DistBackendError with both ways, and may go on.
class Exchange {
 public:
  explicit Exchange(Progress& progress) : progress_(progress) {}
  virtual ~Exchange() = default;
  Exchange(const Exchange&) = delete;
  Exchange& operator=(const Exchange&) = delete;

  /// Compares the calls of all ranks, which have all come when it returns.
  virtual void announce(const Call& call) = 0;
  /// Fills the spans of each rank with that rank's `input`, which may lie there already. All ranks have spans of the
  /// same sizes.
  virtual void all_gather(const Call& call, const std::vector<Spans>& places, const std::byte* input) = 0;
  /// Fills `output` with the sum of the inputs that all ranks have for this one. It may be this rank's own input for
  /// it.
  virtual void reduce_scatter(const Call& call, std::byte* output, const std::vector<const std::byte*>& inputs) = 0;
  /// Sums in place.
  virtual void all_reduce(const Call& call, std::byte* data) = 0;
  /// Whether Gloo's all-reduce is as good, and gives the same bits.
  virtual bool leaves_all_reduce_to_gloo(size_t bytes, at::ScalarType dtype, c10d::ReduceOp::RedOpType op) const = 0;
  /// Bytes that went to a peer over the network so far.
  virtual uint64_t sent_to(int peer) const = 0;
  /// Nothing comes any more, and the peers that wait for this rank fail at once. Called when it is closed, and after a
  /// failure before the call that failed gives up its memory; may be called again.
  virtual void end() = 0;

  int rank() const {
    return progress_.rank();
  }
  int world() const {
    return progress_.size();
  }

 protected:
  /// Raises c10::DistBackendError where a peer calls something else.
  void compare(const Signature& mine, int peer, const Signature& theirs) const;
  /// The peers, the next rank first, so that not all turn to the same.
  std::vector<int> peers() const;
  Progress& progress() const {
    return progress_;
  }

 private:
  Progress& progress_;
};

using MakeExchange = std::function<std::unique_ptr<Exchange>(Carrier&)>;

} // namespace shardwise::transport
