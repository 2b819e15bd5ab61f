#pragma once

#include "transport/exchange.h"
#include "transport/tcp/connections.h"

#include <string>
#include <vector>

namespace shardwise::transport::tcp {

/// All-reduces in which each rank sends to the next one only. Between hosts the links are the bottleneck: here each
/// byte of the result crosses a link at most twice, however many ranks a host has.
///
/// Each rank's share travels round the ring once, while each rank adds its own input, beginning with the rank after the
/// share's own. The result then travels round once more. So the order of additions is the same in every run, but it is
/// not rank order.
class Ring {
 public:
  /// `hosts` has the name of each rank's host. Ranks of one host are placed next to each other.
  Ring(Connections& connections, const std::vector<std::string>& hosts);

  int hosts() const {
    return hosts_;
  }
  /// Sums `data` of all ranks in place. The call was already announced.
  void all_reduce(const Call& call, std::byte* data);

 private:
  int rank_at(int position) const;

  Connections& connections_;
  /// The ranks in ring order, this rank's place among them, and the number of hosts.
  std::vector<int> ranks_;
  int position_ = 0;
  int hosts_ = 0;
  /// Buffers for incoming pieces that this rank adds to.
  std::vector<std::byte> pieces_;
};

} // namespace shardwise::transport::tcp
