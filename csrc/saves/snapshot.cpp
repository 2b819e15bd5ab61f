#include "saves/snapshot.h"

#include "base/compute_guard.h"
#include "base/on_host.h"

#include <ATen/ops/empty.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <unordered_set>
#include <utility>

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
  std::vector<at::Tensor> copies;
  for (const auto& each : values) {
    const auto length = static_cast<int64_t>(each.nbytes());
    copies.push_back(memory_.narrow(0, begin, length).view(each.scalar_type()).view(each.sizes()));
    begin += aligned(length);
  }
  // The host writes first: it must not touch what a device may be writing.
  for (const bool is_host : {true, false}) {
    for (size_t i = 0; i < values.size(); ++i) {
      if (values[i].is_cpu() == is_host) copies[i].copy_(values[i], /*non_blocking=*/true);
    }
  }
  values = std::move(copies);
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
