#pragma once

// How the rows of fully_shard_training wrap their models.
#include "ranks/training_parity.h"

namespace shardwise::test {

using Reshard = std::optional<ReshardAfterForward>;

/// What reshard_after_forward can be: two ranks together hold everything where they are a part of all.
inline std::vector<Reshard> reshards(int world) {
  std::vector<Reshard> all{true, false, std::nullopt};
  if (world > 2 && world % 2 == 0) all.emplace_back(2);
  return all;
}

inline bool frees(const Reshard& reshard, bool when_unset) {
  return reshard ? reshard->frees() : when_unset;
}

/// For wrap_blocks() and its like.
inline auto sharding(const FullyShardOptions& options) {
  return [options](auto modules) { return fully_shard(modules, options); };
}

inline auto sharding(Rank& rank, const Reshard& reshard_after_forward) {
  return sharding(sharded_on(rank).reshard_after_forward(reshard_after_forward));
}

/// Every policy gives the same bits. `wrap` is called with the model and what makes units.
template <typename Model, typename Wrap>
void train_with_each_reshard(
    const Program<Model>& program, const Wrap& wrap,
    const std::function<void(Model&, int part)>& before = [](Model&, int) {}) {
  for (const auto& expected : expect_alone(program)) {
    AlikeRuns runs;
    for (const auto& reshard : reshards(expected.world)) {
      const Wrapping<Model> wrapping{
          .wrap = [&](Model& model, Rank& rank) { wrap(model, sharding(rank, reshard)); }, .before = before};
      runs.run(expected, wrapping);
    }
  }
}

/// Along its longest dimension.
inline int64_t longest(const std::string&, const torch::Tensor& parameter) {
  const auto sizes = parameter.sizes();
  return std::max_element(sizes.begin(), sizes.end()) - sizes.begin();
}

} // namespace shardwise::test
