#include "comm/streams/last_use.h"

#include "kernels/cuda_library.h"

#include <shardwise/error.h>

#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/StringUtil.h>

namespace shardwise::comm {
namespace {

bool has_streams(c10::Device device) {
  return !device.is_cpu() && !device.is_meta();
}

c10::Stream current_stream(c10::Device device) {
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device);
}

} // namespace

uint64_t capture_of(c10::Device device) {
  return has_streams(device) ? kernels::capture_of(current_stream(device)) : 0;
}

void need_no_capture(c10::Device device, c10::function_ref<std::string()> what, const char* remedy) {
  if (!is_captured(device)) return;
  throw Error(c10::str(
      "shardwise: a graph is being captured, but the host must wait for the device, to ", what(),
      ". A graph has no part of the host's. ", remedy));
}

// An event belongs to one device.
void LastUse::note(const at::Tensor& memory) {
  if (stream_ && stream_->device() != memory.device()) *this = LastUse();
  if (!has_streams(memory.device())) return;
  stream_ = current_stream(memory.device());
  capture_ = kernels::capture_of(*stream_);
  if (!event_) event_.emplace(memory.device().type());
  event_->record(*stream_);
}

// A graph cannot wait for what came before its capture, another graph's included, and need not: a capture begins when
// the device is idle, and graphs are replayed one after the other.
void LastUse::await(const at::Tensor& memory) {
  if (!stream_) return;
  const auto here = current_stream(memory.device());
  if (here != *stream_ && capture_ == kernels::capture_of(here)) event_->block(here);
}

// Of what was captured nothing has run, and CUDA refuses to be asked.
void LastUse::make_host_wait() const {
  if (!event_ || captured()) return;
  // With another device current, CUDA would take memory there.
  const c10::DeviceGuard device(stream_->device());
  if (!event_->query()) event_->synchronize();
}

void LastUse::tell_allocator(const at::Tensor& memory) const {
  if (!stream_) return;
  c10::impl::VirtualGuardImpl(memory.device().type()).recordDataPtrOnStream(memory.storage().data_ptr(), *stream_);
}

} // namespace shardwise::comm
