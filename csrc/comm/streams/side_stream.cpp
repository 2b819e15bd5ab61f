#include "comm/streams/side_stream.h"

#include "base/caller.h"

#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <utility>

namespace shardwise::comm {
namespace {

c10::impl::VirtualGuardImpl guard_of(c10::Device device) {
  return c10::impl::VirtualGuardImpl(device.type());
}

} // namespace

SideStream::Lane* SideStream::lane(c10::Device device) {
  if (device.is_cpu() || device.is_meta()) return nullptr;
  const auto guard = guard_of(device);
  if (!device.has_index()) device = guard.getDevice();
  const auto found =
      std::find_if(lanes_.begin(), lanes_.end(), [&](const auto& lane) { return lane.stream.device() == device; });
  if (found != lanes_.end()) return &*found;
  // What it carries lets others go on, so it comes first where a device knows priorities.
  lanes_.push_back({guard.getStreamFromGlobalPool(device, /*isHighPriority=*/true), c10::Event(device.type())});
  return &lanes_.back();
}

SideStream::Scope::Scope(SideStream& side, c10::Device device) {
  if (const auto* lane = side.lane(device)) before_ = guard_of(device).exchangeStream(lane->stream);
}

SideStream::Scope::~Scope() {
  if (before_) guard_of(before_->device()).exchangeStream(*before_);
}

void SideStream::follow_current(c10::Device device) {
  auto* mine = lane(device);
  if (mine == nullptr) return;
  mine->event.record(guard_of(device).getStream(mine->stream.device()));
  mine->event.block(mine->stream);
}

void SideStream::follow(SideStream& other, c10::Device device) {
  auto* theirs = other.lane(device);
  if (theirs == nullptr) return;
  theirs->event.record(theirs->stream);
  theirs->event.block(lane(device)->stream);
}

void SideStream::make_host_wait() {
  for (auto& lane : lanes_) {
    // With another device current, CUDA would take memory there.
    const c10::DeviceGuard device(lane.stream.device());
    lane.event.record(lane.stream);
    lane.event.synchronize();
  }
}

void HostCopies::begin(const at::Tensor& from, LastUse& use, bool waits, c10::function_ref<void()> copy) {
  const SideStream::Scope scope(stream_, from.device());
  use.await(from);
  copy();
  use.note(from);
  under_way_ = under_way_ || !waits;
}

void HostCopies::wait() {
  if (!std::exchange(under_way_, false)) return;
  const base::WithoutCallerLock unlocked;
  stream_.make_host_wait();
}

} // namespace shardwise::comm
