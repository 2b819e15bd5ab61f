#include "comm/last_use.h"

#include "base/torch_versions.h"

#include <c10/core/impl/VirtualGuardImpl.h>

namespace shardwise::comm {
namespace {

bool has_streams(const at::Tensor& memory) {
  return !memory.is_cpu() && !memory.is_meta();
}

c10::Stream current_stream(const at::Tensor& memory) {
  return c10::impl::VirtualGuardImpl(memory.device().type()).getStream(memory.device());
}

} // namespace

// An event belongs to one device.
void LastUse::note(const at::Tensor& memory) {
  if (stream_ && stream_->device() != memory.device()) *this = LastUse();
  if (!has_streams(memory)) return;
  stream_ = current_stream(memory);
  captured_ = base::is_capturing(*stream_);
  if (!event_) event_.emplace(memory.device().type());
  event_->record(*stream_);
}

// A graph cannot wait for what came before its capture, and need not: a capture begins when the device is idle.
void LastUse::await(const at::Tensor& memory) {
  if (!stream_) return;
  const auto here = current_stream(memory);
  if (here != *stream_ && captured_ == base::is_capturing(here)) event_->block(here);
}

void LastUse::make_host_wait() const {
  if (event_ && !event_->query()) event_->synchronize();
}

void LastUse::tell_allocator(const at::Tensor& memory) const {
  if (!stream_) return;
  c10::impl::VirtualGuardImpl(memory.device().type()).recordDataPtrOnStream(memory.storage().data_ptr(), *stream_);
}

} // namespace shardwise::comm
