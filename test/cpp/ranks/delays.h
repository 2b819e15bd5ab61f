#pragma once

// Ranks that are late at random.
#include "observe/seam.h"

#include <atomic>
#include <chrono>
#include <optional>
#include <random>
#include <thread>
#include <vector>

namespace shardwise::test {

using observe::Seam;

/// While it lives, every rank is late at a seam, or at all seams, each time or not and by up to 2 ms: as chance will
/// have it, and differently on every rank. One at a time.
class Delays {
 public:
  explicit Delays(std::optional<Seam> only) {
    observe::set_seam_hook([this, only](Seam seam) {
      if (only && seam != *only) return;
      ++passed_;
      thread_local std::minstd_rand random(++next_seed());
      if (random() % 4 == 0) std::this_thread::sleep_for(std::chrono::microseconds(random() % 2000));
    });
  }
  ~Delays() {
    observe::set_seam_hook({});
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

/// Each seam alone, then all.
inline std::vector<std::optional<Seam>> each_seam_and_all(const std::vector<Seam>& seams) {
  std::vector<std::optional<Seam>> choices(seams.begin(), seams.end());
  choices.emplace_back();
  return choices;
}

} // namespace shardwise::test
