// fully_shard(): shards and gradients are the pieces of what one process computes with all data.
#include "ranks/mlp_parity.h"
#include "ranks/sharded_models.h"

namespace shardwise::test {
namespace {

using Wrap = std::function<void(torch::nn::Sequential&, const FullyShardOptions&)>;

void wrap_root(torch::nn::Sequential& model, const FullyShardOptions& options) {
  fully_shard(model, options);
}

void wrap_layers(torch::nn::Sequential& model, const FullyShardOptions& options) {
  for (const auto& child : model->children()) {
    if (!child->parameters().empty()) fully_shard(*child, options);
  }
  fully_shard(model, options);
}

void train(Rank& rank, const FullyShardOptions& options, const Wrap& wrap) {
  train_mlp(
      rank, {3, 5, 7, 1}, [&](Layers& ours) { wrap(ours, options); },
      [&](const Layers& ours, const Layers& reference, const std::string& what) {
        assert_pieces(*ours, *reference, rank, what);
      });
}

} // namespace

TEST(FullyShard, ParityWithASingleProcess) {
  const auto every_way = [](Rank& rank) {
    for (const auto& wrap : {Wrap(wrap_root), Wrap(wrap_layers)}) {
      for (const auto reshard : {std::optional<bool>(), std::optional<bool>(true), std::optional<bool>(false)}) {
        train(rank, sharded_on(rank).reshard_after_forward(reshard), wrap);
      }
    }
  };
  on_ranks(every_way, by_form<std::vector<int>>({1, 2, 3}, {1, 2, 3, 4, 8}));
}

} // namespace shardwise::test
