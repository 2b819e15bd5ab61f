#pragma once

#include "comm/direct_announcements.h"
#include "comm/direct_wire.h"

#include <cstddef>
#include <vector>

namespace shardwise::comm::direct {

/// A collective of this rank: what it is, and the time that it has.
struct Call {
  Signature signature;
  std::chrono::milliseconds timeout;
};

/// Collectives by sends and receives into their places; all ranks sum in the order of the ranks. Memory is that of
/// contiguous tensors of Call::signature's dtype. One thread uses it, for one collective at a time.
class Exchange {
 public:
  explicit Exchange(Wire& wire);

  /// Compares the calls of all ranks, which have all come when it returns.
  void announce(const Call& call);
  /// Fills the place of each rank with that rank's `input`, which may be its place already.
  void all_gather(const Call& call, const std::vector<std::byte*>& places, const std::byte* input);
  /// Fills `output` with the sum of the inputs that all ranks have for this one. It may be this rank's own input for
  /// it.
  void reduce_scatter(const Call& call, std::byte* output, const std::vector<const std::byte*>& inputs);
  /// Sums in place.
  void all_reduce(const Call& call, std::byte* data);

  Wire& wire() {
    return wire_;
  }
  /// Nothing comes any more.
  void end();

 private:
  /// What each rank is to sum: where this rank's input for it is, and how many bytes.
  struct Parts {
    std::vector<const std::byte*> inputs;
    std::vector<size_t> bytes;
  };
  /// Sums this rank's part piece by piece into `output`, and calls summed(begin, bytes) after each.
  template <typename Summed>
  void sum_pieces(const Call& call, std::byte* output, const Parts& parts, size_t piece, const Summed& summed);
  /// Where the inputs of all ranks are that came with the announcements.
  std::vector<const std::byte*> announced(const std::byte* own) const;
  /// The peers, the next rank first, so that not all send to the same.
  std::vector<int> peers() const;
  int rank() const {
    return wire_.rank();
  }

  Wire& wire_;
  Announcements announcements_;
  /// Pieces that come in, for each peer.
  std::vector<std::byte> pieces_;
};

} // namespace shardwise::comm::direct
