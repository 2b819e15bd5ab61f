#pragma once

#include "saves/pieces.h"

#include <shardwise/detail/export.h>

#include <future>
#include <string>
#include <vector>

namespace shardwise::saves {

/// Saves that are written by a thread while the program goes on: one at a time.
class SHARDWISE_API BackgroundSave {
 public:
  BackgroundSave() = default;
  BackgroundSave(const BackgroundSave&) = delete;
  BackgroundSave& operator=(const BackgroundSave&) = delete;
  /// finish().
  ~BackgroundSave();

  /// Copies this rank's part, and leaves the rest to the thread, which talks to the other ranks over `beside` and uses
  /// it alone meanwhile. Waits for the save before, first of all. Raises the error of the save before, and those of
  /// SaveInProgress.
  void begin(
      const Ranks& ranks, const Ranks& beside, files::Disk& disk, const std::string& place,
      const std::vector<Piece>& pieces, files::Marker about);
  /// Waits for the last save. Raises its error, once. Raises Error in a process that was forked meanwhile, where no
  /// thread writes.
  void wait();
  /// For a program that does not wait: waits for the last one, unless it belongs to a process that this one was forked
  /// from. An error that no call raised goes to stderr, and the process does not exit with 0.
  void finish() noexcept;
  /// Whether wait() would wait.
  bool is_under_way() const;

 private:
  bool is_the_parents() const;
  void leave_to_the_parent();

  Division division_;
  Snapshot snapshot_;
  std::future<void> last_;
  /// When it was begun (base/forked.h).
  int64_t forks_ = 0;
};

} // namespace shardwise::saves
