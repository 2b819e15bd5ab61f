#pragma once

#include <shardwise/error.h>
#include <shardwise/mesh.h>

#include <cstdint>
#include <optional>
#include <string>

namespace shardwise {

/// Goes through batches when ranks have different numbers of them. All ranks take as many steps as the rank that has
/// most, since the forwards and backwards of a step have collectives in which every rank takes part.
///
///   shardwise::for_each_batch(mesh, *loader, [&](auto& batch, double weight) {
///     optimizer.zero_grad();
///     (weight * loss_of(batch)).backward();
///     optimizer.step();
///   });
///
/// `weight` is 1. A rank that has no batch left gets its last one again with a weight of 0, so it adds nothing to the
/// mean of the gradients, which is over all ranks of the mesh. Code that counts examples or changes buffers must use
/// `weight` too. A rank without any batch is an Error on all ranks. Each step takes one small collective. Returns the
/// number of steps.
template <typename Batches, typename Step>
int64_t for_each_batch(const Mesh& mesh, Batches&& batches, const Step& step) {
  auto next = std::begin(batches);
  const auto end = std::end(batches);
  using Batch = std::decay_t<decltype(*next)>;
  std::optional<Batch> batch;
  for (int64_t steps = 0;; ++steps) {
    const bool has_one = next != end;
    if (!mesh.any(has_one)) return steps;
    if (steps == 0 && mesh.any(!has_one)) {
      throw Error(
          "shardwise: rank " + std::to_string(mesh.rank()) + ": for_each_batch(): " + (has_one ? "another" : "this") +
          " rank has no batch at all, so it cannot take part in any step. Give every rank at least one batch, for "
          "example with torch::data::samplers::DistributedRandomSampler.");
    }
    if (has_one) batch.emplace(*next);
    step(*batch, has_one ? 1.0 : 0.0);
    if (has_one) ++next;
  }
}

} // namespace shardwise
