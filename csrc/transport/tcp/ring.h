#pragma once

#include "transport/exchange.h"
#include "transport/tcp/connections.h"

#include <string>
#include <vector>

namespace shardwise::transport::tcp {

/// All-reduces in which a rank sends to the next one alone: between hosts, where a link is what takes time, each byte
/// of the result crosses it twice at most, however many ranks a host has.
///
/// Each rank's share goes round once while the ranks add to it what they have, the first of them being the one after
/// its own, and once more when it is complete. So the order of the additions is the same in every run; it is not that
/// of the ranks.
class Ring {
 public:
  /// Ranks of a host, of which `hosts` has the name for each rank, stand beside each other.
  Ring(Connections& connections, const std::vector<std::string>& hosts);

  int hosts() const {
    return hosts_;
  }
  /// Sums in place what all ranks have; the call was announced.
  void all_reduce(const Call& call, std::byte* data);

 private:
  int rank_at(int place) const;

  Connections& connections_;
  /// The ranks in their order, where this one stands, and how many hosts they have.
  std::vector<int> ranks_;
  int place_ = 0;
  int hosts_ = 0;
  /// Pieces that come in, to be added to.
  std::vector<std::byte> pieces_;
};

} // namespace shardwise::transport::tcp
