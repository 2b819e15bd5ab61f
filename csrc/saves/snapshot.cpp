#include "saves/snapshot.h"

#include "base/compute_guard.h"
#include "base/on_host.h"

#include <ATen/ops/empty.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <unordered_set>

namespace shardwise::saves {
namespace {

/// Where the next copy may begin: a multiple of what any dtype needs.
int64_t aligned(int64_t bytes) {
  constexpr int64_t kAlignment = 64;
  return (bytes + kAlignment - 1) / kAlignment * kAlignment;
}

} // namespace

void Snapshot::take(std::vector<at::Tensor>& values) {
  const base::ComputeGuard guard;
  int64_t bytes = 0;
  std::unordered_set<at::Device> devices;
  for (const auto& each : values) {
    bytes += aligned(static_cast<int64_t>(each.nbytes()));
    if (!each.is_cpu()) devices.insert(each.device());
  }
  if (!memory_.defined() || memory_.numel() < bytes) {
    memory_ = at::Tensor();
    memory_ = at::empty({bytes}, base::on_host(at::kByte).pinned_memory(!devices.empty()));
  }
  int64_t begin = 0;
  for (auto& each : values) {
    const auto length = static_cast<int64_t>(each.nbytes());
    auto copy = memory_.narrow(0, begin, length).view(each.scalar_type()).view(each.sizes());
    copy.copy_(each, /*non_blocking=*/true);
    each = std::move(copy);
    begin += aligned(length);
  }
  copied_.clear();
  for (const auto device : devices) {
    const c10::impl::VirtualGuardImpl streams(device.type());
    copied_.emplace_back(device.type()).record(streams.getStream(device));
  }
}

void Snapshot::wait() {
  for (auto& event : copied_) event.synchronize();
  copied_.clear();
}

} // namespace shardwise::saves
