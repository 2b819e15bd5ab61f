#pragma once

#include "thread_group/meeting.h"

#include <chrono>
#include <map>
#include <memory>
#include <vector>

namespace late {

class Stream;

/// What the ranks of a communicator have in common. Its collectives run on workers of the ranks' devices and meet here,
/// as kernels that wait for each other. A mismatch is reported and ends the communicator, where NCCL would hang or mix
/// data.
class Communicator final : public thread_group::Communicator {
 public:
  using thread_group::Communicator::Communicator;
  using Part = thread_group::Part;
  using Place = thread_group::Place;
  using Compute = thread_group::Compute;

  // Three steps, so that several meetings may be under way at once.
  void arrive(const Place& place, Part part, double time);
  /// Waits for the others, and computes.
  struct Computed {
    /// Empty once the communicator has failed.
    std::vector<at::Tensor> results = {};
    /// When all were there, in virtual time.
    double time = 0;
  };
  Computed compute(const Place& place, const Compute& compute, std::chrono::milliseconds timeout);
  /// Waits until the others have computed too, so that what they read may be overwritten. Returns whether all went
  /// well.
  bool leave(const Place& place, std::chrono::milliseconds timeout);

 private:
  struct Meeting {
    std::vector<std::unique_ptr<Part>> parts;
    int arrived = 0;
    int done = 0;
    int left = 0;
    double time = 0;
  };
  Meeting& meeting(const Place& place);
  void compare(const Place& place, const Meeting& meeting);
  void wait(
      std::unique_lock<std::mutex>& lock, const Place& place, const int& count, std::chrono::milliseconds timeout);

  std::map<std::pair<std::string, uint64_t>, Meeting> meetings_;
};

} // namespace late
