#pragma once

#include "transport/exchange.h"
#include "transport/tcp/announcements.h"
#include "transport/tcp/ring.h"

namespace shardwise::transport::tcp {

/// Collectives by sends and receives straight to and from where the data lies.
class TcpExchange final : public Exchange {
 public:
  /// `hosts` has the name of each rank's host.
  TcpExchange(Carrier& carrier, const std::vector<std::string>& hosts);

  void announce(const Call& call) override;
  void all_gather(const Call& call, const std::vector<Spans>& places, const std::byte* input) override;
  void reduce_scatter(const Call& call, std::byte* output, const std::vector<const std::byte*>& inputs) override;
  void all_reduce(const Call& call, std::byte* data) override;
  bool leaves_all_reduce_to_gloo(size_t bytes, at::ScalarType dtype, c10d::ReduceOp::RedOpType op) const override;
  uint64_t sent_to(int peer) const override {
    return connections_.sent_to(peer);
  }
  void end() override {
    announcements_.end();
  }

 private:
  /// For each rank: this rank's input for its sum, and the size.
  struct Parts {
    std::vector<const std::byte*> inputs;
    std::vector<size_t> bytes;
  };
  /// Exchanges the announcements. Returns when all have come and are the same.
  void begin(const Call& call, size_t bytes, Announcements::Inlined inlined);
  /// Sums this rank's part into `output`, piece by piece; calls summed(begin, bytes) after each piece.
  template <typename Summed>
  void sum_pieces(const Call& call, std::byte* output, const Parts& parts, size_t piece, const Summed& summed);
  /// Each rank sends everything to all others, and sums everything itself.
  void sum_whole(const Call& call, std::byte* data);
  /// All ranks' inputs, as they came with the announcements.
  Terms announced(const std::byte* own) const;

  Connections connections_;
  Announcements announcements_;
  Ring ring_;
  /// Buffers for the incoming pieces of each peer.
  std::vector<std::byte> pieces_;
};

} // namespace shardwise::transport::tcp
