#include "stream.h"

#include "device.h"
#include "faults.h"

#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <array>
#include <atomic>
#include <cstdlib>
#include <random>
#include <thread>

namespace late {
namespace {

std::atomic<size_t> streams{0};

/// Where the delays of the streams come from; SHARDWISE_LATE_SEED, or 0.
uint64_t seed() {
  static const uint64_t value = [] {
    const char* text = std::getenv("SHARDWISE_LATE_SEED"); // NOLINT(concurrency-mt-unsafe)
    return text == nullptr ? 0 : std::strtoull(text, nullptr, 10);
  }();
  return value;
}

} // namespace

Stream::Stream(int device, c10::StreamId id) : device_(device), id_(id), number_(streams++) {}

c10::Stream Stream::handle() const {
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(c10::kPrivateUse1, static_cast<c10::DeviceIndex>(device_)), id_);
}

void Stream::push(std::function<void()> task, double issued, double cost) {
  const std::lock_guard lock(mutex_);
  tasks_.push_back({std::move(task), issued, cost});
  pushed_.notify_one();
  if (std::exchange(started_, true)) return;
  // The process ends while it waits for more.
  std::thread([this] { work(); }).detach();
}

bool Stream::is_idle() {
  const std::lock_guard lock(mutex_);
  return tasks_.empty() && !busy_;
}

void Stream::work() {
  // A copy to what a unit has on the host tells the unit, which asks for an event.
  set_current_device(device_);
  at::init_num_threads();
  at::set_num_threads(1);
  const at::NoGradGuard without_gradients;
  const at::AutoDispatchBelowADInplaceOrView kernels_alone;
  std::mt19937_64 random(seed() * 1000003 + number_);
  std::unique_lock lock(mutex_);
  for (;;) {
    busy_ = false;
    pushed_.wait(lock, [&] { return !tasks_.empty(); });
    auto task = std::move(tasks_.front());
    tasks_.pop_front();
    busy_ = true;
    lock.unlock();
    if (random() % 16 == 0) std::this_thread::sleep_for(std::chrono::microseconds(random() % 300));
    advance_to(task.issued);
    try {
      task.run();
    } catch (const c10::Error& error) {
      report(c10::str(
          "on stream ", id_, " of device ", device_, ", an operation failed: ", error.what_without_backtrace()));
    } catch (const std::exception& error) {
      report(c10::str("on stream ", id_, " of device ", device_, ", an operation failed: ", error.what()));
    }
    time_ += task.cost;
    task.run = nullptr; // Its tensors may need a lock of the program's to go, whose holder waits for this stream's.
    lock.lock();
  }
}

} // namespace late
