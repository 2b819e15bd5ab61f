#pragma once

// What the host waits for in a step on the late device.
#include "late_test.h"
#include "ranks/fully_shard_models.h"

#include <functional>
#include <optional>

namespace shardwise::test {

/// How often the host waits in each of some steps, once others were made. If they are `captured`, what waits or takes
/// memory from the system raises, as where a graph captures them.
inline double waits_of_a_step(Rank& rank, const std::function<void()>& step, bool captured = false) {
  for (int k = 0; k < 3; ++k) step();
  // A capture begins when the device is idle.
  if (captured) late::Device::of(rank.rank()).synchronize_all();
  const auto before = late::host_waits(rank.rank());
  {
    std::optional<late::Capturing> capturing;
    if (captured) capturing.emplace(rank.rank());
    for (int k = 0; k < 3; ++k) step();
  }
  const auto waits = static_cast<double>(late::host_waits(rank.rank()) - before) / 3;
  late::current_stream(rank.rank()).synchronize();
  return waits;
}

/// The same where a model is trained, and `between` runs after each backward.
inline double waits_of_training(
    Rank& rank, Stack& model, bool captured = false, const std::function<void()>& between = [] {}) {
  torch::optim::AdamW optimizer(model->parameters(), torch::optim::AdamWOptions(0.02));
  const auto batch = tokens(0, rank.rank());
  return waits_of_a_step(
      rank,
      [&] {
        optimizer.zero_grad();
        call(model, batch).pow(2).mean().backward();
        if (between) between();
        optimizer.step();
      },
      captured);
}

} // namespace shardwise::test
