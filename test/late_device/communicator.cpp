#include "communicator.h"

#include "faults.h"

namespace late {

Communicator::Meeting& Communicator::meeting(const Place& place) {
  auto& meeting = meetings_[place.key()];
  meeting.parts.resize(place.size);
  return meeting;
}

void Communicator::arrive(const Place& place, Part part, double time) {
  const std::lock_guard lock(mutex_);
  auto& own = meeting(place);
  own.parts[place.rank] = std::make_unique<Part>(std::move(part));
  own.time = std::max(own.time, time);
  if (++own.arrived == place.size) compare(place, own);
  changed_.notify_all();
}

// Under the mutex.
void Communicator::compare(const Place& place, const Meeting& meeting) {
  if (!failure_.empty()) return;
  failure_ = difference(place, [&](int rank) -> const std::string& { return meeting.parts[rank]->signature; });
  if (!failure_.empty()) report(failure_);
}

void Communicator::wait(
    std::unique_lock<std::mutex>& lock, const Place& place, const int& count, std::chrono::milliseconds timeout) {
  if (changed_.wait_for(lock, timeout, [&] { return count == place.size || !failure_.empty(); })) return;
  const auto& own = meeting(place);
  set_failure(timed_out(
      place, own.parts[place.rank]->signature, timeout, [&](int rank) { return own.parts[rank] != nullptr; }));
}

Communicator::Computed Communicator::compute(
    const Place& place, const Compute& compute, std::chrono::milliseconds timeout) {
  std::unique_lock lock(mutex_);
  auto& own = meeting(place);
  wait(lock, place, own.arrived, timeout);
  Computed computed{.time = own.time};
  if (failure_.empty()) {
    std::vector<Part> parts;
    for (const auto& part : own.parts) parts.push_back(*part);
    lock.unlock();
    computed.results = compute(parts);
    parts.clear();
    lock.lock();
  }
  ++own.done;
  changed_.notify_all();
  return computed;
}

bool Communicator::leave(const Place& place, std::chrono::milliseconds timeout) {
  std::unique_lock lock(mutex_);
  auto& own = meeting(place);
  wait(lock, place, own.done, timeout);
  if (!failure_.empty()) return false;
  if (++own.left == place.size) meetings_.erase(place.key());
  return true;
}

} // namespace late
