#include "group/copies.h"

#include "base/compute_guard.h"
#include "observe/label.h"
#include "observe/step_point.h"

#include <utility>

namespace shardwise::group {

void Copies::begin_unshard(
    const comm::Collectives& collectives, bool may_hold, comm::Buffers& buffers, const std::string& unit,
    Counters& counters) {
  if (!must_gather()) return;
  const observe::Label label("FSDP::all_gather", unit);
  ++counters.unshards;
  const bool from_held = holds();
  stale_ = false;
  gathered_versions_ = versions();
  const base::ComputeGuard compute;
  provide(from_held, may_hold, collectives, buffers, counters);
  state_ = State::gathering;
  try {
    observe::pass(observe::StepPoint::unshard);
    start(collectives, buffers, unit, counters);
  } catch (...) {
    drop_gather(buffers, counters);
    throw;
  }
}

bool Copies::finish_unshard(int64_t holders, comm::Buffers& buffers, const std::string& unit, Counters& counters) {
  if (state_ != State::gathering) return false;
  const observe::Label label("FSDP::all_gather_copy_out", unit);
  observe::pass(observe::StepPoint::copy_out);
  auto pending = std::exchange(pending_, std::nullopt);
  try {
    if (pending) {
      const base::ComputeGuard compute;
      pending->wait();
    }
    await_gather();
    copy_out(holders, buffers, counters);
  } catch (...) {
    drop_gather(buffers, counters);
    throw;
  }
  release(buffers);
  state_ = State::full;
  return written();
}

void Copies::leave_buffers() {
  await_gather();
  gathered_ = sent_ = at::Tensor();
  if (gathers_into_leaves()) memory_ = at::Tensor();
}

void Copies::drop_gather(comm::Buffers& buffers, Counters& counters) {
  leave_buffers();
  state_ = State::full;
  mark_stale();
  reshard(buffers, /*keeps_memory=*/false, counters);
}

void Copies::release(comm::Buffers& buffers) {
  if (!gathered_.defined() && !sent_.defined()) return;
  const base::ComputeGuard guard;
  const auto gathered = std::exchange(gathered_, at::Tensor());
  if (gathers_apart()) buffers.give(gathered);
  buffers.give(std::exchange(sent_, at::Tensor()));
}

void Copies::reshard(comm::Buffers& buffers, bool keeps_memory, Counters& counters) {
  if (state_ == State::freed) return;
  auto pending = std::exchange(pending_, std::nullopt);
  if (pending && !pending->wait_noexcept()) leave_buffers();
  await_gather();
  release(buffers);
  free_leaves();
  if (!keeps_memory) buffers.give(std::exchange(memory_, at::Tensor()));
  state_ = State::freed;
  ++counters.reshards;
}

} // namespace shardwise::group
