#include "host_wire.h"

#include <algorithm>

HostWire::HostWire() : courier_([this] { deliver(); }) {}

HostWire::~HostWire() {
  {
    const std::lock_guard lock(mutex_);
    closed_ = true;
  }
  changed_.notify_all();
  courier_.join();
}

c10::intrusive_ptr<c10d::Work> HostWire::carry(const Start& start, std::vector<at::Tensor> results, Seconds takes) {
  auto late = c10::make_intrusive<FutureWork>(std::vector<c10::Device>());
  auto work = start();
  {
    const std::lock_guard lock(mutex_);
    free_ = std::max(free_, Clock::now()) + std::chrono::duration_cast<Clock::duration>(takes);
    parcels_.push_back({std::move(work), std::move(results), late, free_});
  }
  changed_.notify_all();
  return late;
}

void HostWire::deliver() {
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [&] { return closed_ || !parcels_.empty(); });
    if (parcels_.empty()) return;
    const auto parcel = std::move(parcels_.front());
    parcels_.pop_front();
    lock.unlock();
    std::exception_ptr error;
    try {
      parcel.work->wait();
    } catch (...) {
      error = std::current_exception();
    }
    std::this_thread::sleep_until(parcel.due);
    parcel.late->end(parcel.results, error);
    lock.lock();
  }
}
