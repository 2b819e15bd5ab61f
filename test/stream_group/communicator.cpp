#include "communicator.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <stdexcept>

namespace stream_group {
namespace {

/// While one lives, this thread issues on a stream, and nothing else that the rank has set up here takes part: it
/// issues for all ranks.
class Issuing {
 public:
  explicit Issuing(const c10::Stream& stream) : device_(stream.device()), stream_(stream) {}

 private:
  const c10::DeviceGuard device_;
  const c10::StreamGuard stream_;
  const at::NoGradGuard without_gradients_;
  const c10::impl::ForceDispatchKeyGuard nothing_else_{c10::default_included_set, c10::default_excluded_set};
  const at::AutoDispatchBelowADInplaceOrView kernels_alone_;
};

} // namespace

void Communicator::arrive(const thread_group::Place& place, Arrival arrival) {
  std::vector<std::shared_ptr<Call>> ended;
  {
    const std::lock_guard lock(mutex_);
    if (!failure_.empty()) throw std::runtime_error(failure_);
    auto& meeting = meetings_[place.key()];
    meeting.resize(place.size);
    meeting[place.rank] = std::make_unique<Arrival>(std::move(arrival));
    if (std::any_of(meeting.begin(), meeting.end(), [](const auto& each) { return each == nullptr; })) return;
    try {
      ended = issue(place, std::move(meeting));
    } catch (const c10::Error& error) {
      set_failure(error.what_without_backtrace());
    } catch (const std::exception& error) {
      set_failure(error.what());
    }
    if (!failure_.empty()) throw std::runtime_error(failure_);
    meetings_.erase(place.key());
  }
  for (const auto& call : ended) {
    const Issuing on(stream_.get());
    call->future->markCompleted(at::IValue(call->results));
  }
  // Once a rank goes on, nobody else may hold its memory.
  const std::lock_guard lock(mutex_);
  for (const auto& call : ended) call->issued = true;
  ended.clear();
  changed_.notify_all();
}

std::vector<std::shared_ptr<Call>> Communicator::issue(const thread_group::Place& place, Meeting meeting) {
  const auto differ = difference(place, [&](int rank) -> const std::string& { return meeting[rank]->part.signature; });
  if (!differ.empty()) throw std::runtime_error(differ);
  const Issuing on(stream_.get());
  for (const auto& each : meeting) each->ready.block(stream_.get());
  std::vector<thread_group::Part> parts;
  for (const auto& each : meeting) parts.push_back(each->part);
  // All results before any output: an output may be another's input.
  std::vector<std::vector<at::Tensor>> results;
  for (const auto& each : meeting) results.push_back(each->compute(parts));
  std::vector<std::shared_ptr<Call>> ended;
  for (size_t rank = 0; rank < meeting.size(); ++rank) {
    auto& own = *meeting[rank];
    for (size_t k = 0; k < results[rank].size(); ++k) own.outputs[k].copy_(results[rank][k]);
    if (--own.call->missing == 0) ended.push_back(own.call);
  }
  for (const auto& call : ended) call->end.record(stream_.get());
  return ended;
}

void Communicator::wait(const Call& call) {
  std::unique_lock lock(mutex_);
  changed_.wait_until(lock, call.deadline, [&] { return call.issued || !failure_.empty(); });
  fail_late(call);
  if (!failure_.empty()) throw std::runtime_error(failure_);
  lock.unlock();
  const auto device = stream_.get().device();
  call.end.block(c10::impl::VirtualGuardImpl(device.type()).getStream(device));
}

bool Communicator::is_over(const Call& call) {
  const std::lock_guard lock(mutex_);
  fail_late(call);
  return !failure_.empty() || (call.issued && call.end.query());
}

void Communicator::fail_late(const Call& call) {
  if (call.issued || !failure_.empty() || std::chrono::steady_clock::now() < call.deadline) return;
  for (const auto& [key, meeting] : meetings_) {
    for (size_t rank = 0; rank < meeting.size(); ++rank) {
      if (!meeting[rank] || meeting[rank]->call.get() != &call) continue;
      const thread_group::Place place{key.first, static_cast<int>(rank), static_cast<int>(meeting.size()), key.second};
      set_failure(timed_out(
          place, meeting[rank]->part.signature, call.timeout, [&](int other) { return meeting[other] != nullptr; }));
      return;
    }
  }
}

void Communicator::set_failure(const std::string& reason) {
  thread_group::Communicator::set_failure(reason);
  // What was left here is never issued.
  meetings_.clear();
}

std::string Communicator::failure(const Call& call) {
  const std::lock_guard lock(mutex_);
  fail_late(call);
  return failure_;
}

} // namespace stream_group
