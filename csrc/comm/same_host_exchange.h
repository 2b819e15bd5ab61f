#pragma once

#include "comm/direct_exchange.h"
#include "comm/same_host_members.h"
#include "comm/same_host_steps.h"

namespace shardwise::comm::same_host {

/// Collectives of ranks that read each other's memory. What lies in a rank's arena is read where it lies, and a
/// collective is over when all have read it; other tensors pass through a stage on the rank's board, piece by piece.
/// Little data is on the board along with the announcement.
class SameHostExchange final : public direct::Exchange {
 public:
  SameHostExchange(direct::Wire& wire, std::shared_ptr<Members> members);

  void announce(const direct::Call& call) override;
  void all_gather(const direct::Call& call, const std::vector<direct::Spans>& places, const std::byte* input) override;
  void reduce_scatter(
      const direct::Call& call, std::byte* output, const std::vector<const std::byte*>& inputs) override;
  void all_reduce(const direct::Call& call, std::byte* data) override;
  bool leaves_all_reduce_to_gloo(
      size_t /*bytes*/, at::ScalarType /*dtype*/, c10d::ReduceOp::RedOpType /*op*/) const override {
    return false;
  }
  void end() override;

 private:
  /// What this rank has for each: `bytes` at each place.
  struct Given {
    std::vector<const std::byte*> places;
    size_t bytes = 0;
  };
  /// Where each rank's data for this one is, as far as there is one place for all of it.
  using Terms = std::vector<const std::byte*>;

  /// Carries it out; where that fails, the peers hear of it.
  template <typename Run>
  void carry_out(const direct::Call& call, const Run& run);
  /// Announces it, and waits for all. Gives where the data is, unless some of it has to be staged.
  std::optional<Terms> open(const direct::Call& call, const Given& given);
  /// Of one rank, on its board: `offset` in it.
  const std::byte* board(int rank, size_t offset) const;
  void sum(const direct::Call& call, std::byte* output, const Terms& terms, size_t bytes) const;

  void gather_staged(const std::vector<direct::Spans>& places, const std::byte* input, size_t bytes);
  void scatter_staged(const direct::Call& call, std::byte* output, const Given& given);
  void reduce_staged(const direct::Call& call, std::byte* data);

  std::shared_ptr<Members> members_;
  Board layout_;
  Steps steps_;
  uint64_t staged_ = 0;
};

} // namespace shardwise::comm::same_host
