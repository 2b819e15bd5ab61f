#include "comm/streams/side_stream.h"

#include <algorithm>

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
    lane.event.record(lane.stream);
    lane.event.synchronize();
  }
}

} // namespace shardwise::comm
