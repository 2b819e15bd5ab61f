#pragma once

#include "wire.h"

#include <condition_variable>
#include <deque>
#include <thread>

/// For tensors on the CPU: a thread waits until the link would be done.
class HostWire : public Wire {
 public:
  HostWire();
  ~HostWire() override;
  HostWire(const HostWire&) = delete;
  HostWire& operator=(const HostWire&) = delete;

 private:
  using Clock = std::chrono::steady_clock;
  struct Parcel {
    c10::intrusive_ptr<c10d::Work> work;
    std::vector<at::Tensor> results;
    c10::intrusive_ptr<FutureWork> late;
    Clock::time_point due;
  };

  c10::intrusive_ptr<c10d::Work> carry(const Start& start, std::vector<at::Tensor> results, Seconds takes) override;
  void deliver();

  std::mutex mutex_;
  std::condition_variable changed_;
  Clock::time_point free_;
  std::deque<Parcel> parcels_;
  bool closed_ = false;
  std::thread courier_;
};
