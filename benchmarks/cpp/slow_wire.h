#pragma once

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <chrono>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>

/// A link between this rank and the others: what is sent waits for what was sent before, and takes a latency and as
/// long as its bytes do. Collectives are those of another back end, told to be over when the link would be done.
class SlowWire {
 public:
  struct Speed {
    std::chrono::duration<double> latency{0};
    /// 0: as fast as the other back end.
    double bytes_per_second = 0;
  };

  SlowWire();
  ~SlowWire();
  SlowWire(const SlowWire&) = delete;
  SlowWire& operator=(const SlowWire&) = delete;

  void set_speed(const Speed& speed);
  /// Takes the place of the group's back end for CPUs. The wire must outlive the group's use.
  void put_into(c10d::ProcessGroup& group);
  /// How long the link was busy so far, and what it carried.
  std::chrono::duration<double> busy() const;
  double bytes() const;

 private:
  using Clock = std::chrono::steady_clock;
  class Late;
  class Backend;
  struct Parcel {
    c10::intrusive_ptr<c10d::Work> work;
    c10::intrusive_ptr<Late> late;
    Clock::time_point due;
  };

  c10::intrusive_ptr<c10d::Work> send(c10::intrusive_ptr<c10d::Work> work, double bytes);
  void deliver();

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  Speed speed_;
  Clock::time_point free_;
  std::chrono::duration<double> busy_{0};
  double bytes_ = 0;
  std::deque<Parcel> parcels_;
  bool closed_ = false;
  std::thread courier_;
};
