#pragma once

#include "transport/exchange.h"
#include "transport/same_host/host_group.h"
#include "transport/same_host/step_barrier.h"

namespace shardwise::transport::same_host {

/// Collectives of ranks that read each other's memory. Data in a rank's arena is read in place, and the collective ends
/// when all have read it. Other tensors pass through a stage on the rank's board, piece by piece. Small data lies on
/// the board with the announcement.
class SameHostExchange final : public Exchange {
 public:
  SameHostExchange(Progress& progress, std::shared_ptr<HostGroup> members);

  void announce(const Call& call) override {
    open(call, {});
  }
  void all_gather(const Call& call, const std::vector<Spans>& places, const std::byte* input) override;
  void reduce_scatter(const Call& call, std::byte* output, const std::vector<const std::byte*>& inputs) override;
  void all_reduce(const Call& call, std::byte* data) override;
  void end() override {
    steps_.end();
  }

 private:
  /// This rank's data for each rank: `bytes` at each place.
  struct Given {
    std::vector<const std::byte*> places;
    size_t bytes = 0;
  };

  /// Announces the call, and waits for all ranks. Returns where their data for this rank lies, or nothing if any of it
  /// has to be staged.
  std::optional<Terms> open(const Call& call, const Given& given);
  /// The address of `offset` on a rank's board.
  const std::byte* board(int rank, size_t offset) const;

  void gather_staged(const std::vector<Spans>& places, const std::byte* input, size_t bytes);
  void scatter_staged(const Call& call, std::byte* output, const Given& given);
  void reduce_staged(const Call& call, std::byte* data);

  std::shared_ptr<HostGroup> members_;
  ControlBlock layout_;
  StepBarrier steps_;
  uint64_t staged_ = 0;
};

} // namespace shardwise::transport::same_host
