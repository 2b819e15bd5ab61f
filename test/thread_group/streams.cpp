#include "streams.h"

#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <mutex>
#include <vector>

namespace thread_group {
namespace {

std::mutex mutex;

std::vector<c10::Stream>& idle() {
  static auto* const streams = new std::vector<c10::Stream>;
  return *streams;
}

c10::Stream take(const c10::Device& device) {
  const std::lock_guard lock(mutex);
  const auto found =
      std::find_if(idle().begin(), idle().end(), [&](const auto& stream) { return stream.device() == device; });
  if (found == idle().end()) return c10::impl::VirtualGuardImpl(device.type()).getNewStream(device);
  const auto stream = *found;
  idle().erase(found);
  return stream;
}

} // namespace

BorrowedStream::BorrowedStream(const c10::Device& device) : stream_(take(device)) {}

BorrowedStream::~BorrowedStream() {
  const std::lock_guard lock(mutex);
  idle().push_back(stream_);
}

} // namespace thread_group
