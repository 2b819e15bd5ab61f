#pragma once

#include "memory.h"
#include "stream.h"

#include <c10/core/Device.h>

#include <chrono>
#include <functional>
#include <future>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace late {

/// How many devices there are.
constexpr int kDevices = 8;

/// Bytes that an operation reads or writes, on a device or in pinned memory.
struct Use {
  uintptr_t begin;
  uintptr_t end;
  bool writes;
};

/// One device: its streams, what the host knows of them, and its memory.
class Device {
 public:
  static Device& of(int index);
  static Device& of(const c10::Device& device) {
    return of(device.index());
  }

  explicit Device(int index);

  c10::Stream stream_of_pool();
  c10::Stream new_stream();
  /// For tasks, which may move the virtual time of their stream.
  Stream& stream_of_task(c10::StreamId id);

  /// Runs `run` on a stream, after all that was issued there before and whatever the stream was told to wait for.
  /// Reports a use that is not ordered after what it must not overtake. `cost`: in virtual time; less than 0 for what
  /// set_costs() says.
  void issue(
      c10::StreamId stream, const char* name, const std::vector<Use>& uses, std::function<void()> run,
      double cost = -1);

  struct Event {
    Clock clock = {};
    /// The virtual time at which its stream comes here.
    std::shared_future<double> reached = {};
    bool is_reached() const {
      return reached.wait_for(std::chrono::seconds(0)) == std::future_status::ready;
    }
  };
  Event record(c10::StreamId stream);
  /// What this stream gets from now on waits for the event, also one of another device.
  void wait(c10::StreamId stream, const Event& event);
  bool query(const Event& event);
  /// Block the host. `what` it does, should that be forbidden.
  void synchronize(const Event& event, const char* what);
  void synchronize(c10::StreamId stream, const char* what) {
    synchronize(record(stream), what);
  }
  void synchronize_all();
  bool is_idle(c10::StreamId stream);

  /// Memory for a stream.
  uintptr_t take(size_t size, c10::StreamId stream);
  /// Free as soon as its stream, and whatever stream was recorded, has come here. Reports any other that may still use
  /// it.
  void give(uintptr_t address);
  void record_stream(uintptr_t address, c10::StreamId stream);
  size_t used();
  size_t peak();
  void reset_peak();

  /// Virtual time at which the host last knew something of the device.
  double host_time();

 private:
  /// Memory that waits for streams.
  struct Given {
    Block* block;
    std::vector<Event> until;
  };

  Stream& stream(c10::StreamId id);
  void host_knows(const Clock& clock, double time);
  /// Reports a conflict, and from then on takes the two for ordered: one mistake is told once.
  void check(const Use& use, const Operation& operation, Clock& clock);

  const int index_;
  std::mutex mutex_;
  Clock host_;
  double host_time_ = 0;
  std::vector<std::unique_ptr<Stream>> streams_;
  size_t pool_ = 0;
  Memory memory_;
  std::vector<Given> waiting_;
};

/// What an operation of this name costs that touches so many bytes, in virtual time; nothing unless it is set. For a
/// test that has the process to itself.
void set_costs(std::function<double(const std::string& name, size_t bytes)> costs);

/// Who holds a lock that a stream may need, as Python's, lets go of it around `wait`, which blocks the host.
void set_around_waits(std::function<void(const std::function<void()>& wait)> around);

/// The current device and streams of this thread.
int current_device();
void set_current_device(int index);
c10::Stream current_stream(int device);
c10::Stream exchange_current_stream(const c10::Stream& stream);

} // namespace late
