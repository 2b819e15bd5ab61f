#pragma once

// Ranks that are late at random.
#include "observe/step_point.h"

#include <atomic>
#include <chrono>
#include <optional>
#include <random>
#include <thread>

namespace shardwise::test {

using observe::StepPoint;

/// While it lives, every rank is late at a point, or at all points, each time or not and by up to 2 ms: as chance will
/// have it, and differently on every rank. One at a time.
class Delays {
 public:
  explicit Delays(std::optional<StepPoint> only) {
    observe::set_step_point_hook([this, only](StepPoint point) {
      if (only && point != *only) return;
      ++passed_;
      thread_local std::minstd_rand random(++next_seed());
      if (random() % 4 == 0) std::this_thread::sleep_for(std::chrono::microseconds(random() % 2000));
    });
  }
  ~Delays() {
    observe::set_step_point_hook({});
  }
  Delays(const Delays&) = delete;
  Delays& operator=(const Delays&) = delete;

  /// How often ranks came by.
  int passed() const {
    return passed_;
  }

 private:
  static std::atomic<unsigned>& next_seed() {
    static std::atomic<unsigned> seed = 1;
    return seed;
  }

  std::atomic<int> passed_ = 0;
};

} // namespace shardwise::test
