#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <cstdint>
#include <memory>
#include <string>
#include <thread>
#include <vector>

namespace shardwise::test {

/// Process groups of ranks that are threads, whose results come late: in an order and after delays that follow from a
/// seed, to each rank at another time. Several collectives may be open at a time, and they end in any order.
///
/// Whoever does not wait is found out. An output is full of NaN from the launch to the end; inputs are read when the
/// first rank gets its result; what is summed must not change, an output must not be written, and no memory must go
/// away before the end. Sums are in the order of the ranks, so that results do not depend on the seed.
class LateNetwork {
 public:
  explicit LateNetwork(int ranks);
  /// What is open fails.
  ~LateNetwork();
  LateNetwork(const LateNetwork&) = delete;
  LateNetwork& operator=(const LateNetwork&) = delete;

  /// One rank's end of the process group of that number: all-gathers and reduce-scatters of one tensor, all-reduces
  /// (sums) and broadcasts, of contiguous CPU tensors. It must not outlive the network.
  c10::intrusive_ptr<c10d::Backend> backend(int group, int rank);

  /// Decides about the collectives that this rank launches from now on. Without a call nothing is late.
  void be_late(int rank, uint64_t seed);

  /// Ends everything that is open, and all that is launched later, with an error.
  void close();

  /// What was done to memory that the network was using.
  std::vector<std::string> complaints() const;
  /// Most collectives that were open at a time, and how many ended before one that was launched earlier on all ranks.
  int64_t most_open() const;
  int64_t overtaken() const;

 private:
  struct State;
  class Work;
  class Backend;
  std::shared_ptr<State> state_;
  std::thread courier_;
};

} // namespace shardwise::test
