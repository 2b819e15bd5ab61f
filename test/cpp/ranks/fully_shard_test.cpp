// fully_shard(): shards and gradients are the pieces of what one process computes with all data.
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

void train(Rank& rank, const std::vector<int64_t>& widths, const FullyShardOptions& options, const Wrap& wrap) {
  auto ours = mlp(widths);
  auto reference = mlp(widths);
  wrap(ours, options);
  torch::optim::Adam mine(ours->parameters(), 0.05);
  torch::optim::Adam theirs(reference->parameters(), 0.05);
  for (int step = 0; step < 10; ++step) {
    rank.step("step " + std::to_string(step));
    mine.zero_grad();
    theirs.zero_grad();
    auto loss = ours->forward(batch(step, rank.rank(), widths[0])).pow(2).mean();
    loss.backward();
    reference_backward(rank, [&](int r) {
      auto expected = reference->forward(batch(step, r, widths[0])).pow(2).mean();
      if (r == rank.rank()) assert_close(loss.detach(), expected.detach(), "loss");
      return expected;
    });
    assert_pieces(*ours, *reference, rank, "before the optimizer, step " + std::to_string(step));
    mine.step();
    theirs.step();
    assert_pieces(*ours, *reference, rank, "step " + std::to_string(step));
  }
}

} // namespace

TEST(FullyShard, ParityWithASingleProcess) {
  for (const int world : {1, 2, 3, 4}) {
    for (const auto& widths : std::vector<std::vector<int64_t>>{{4, 6, 2}, {3, 5, 7, 1}}) {
      for (const auto& wrap : {Wrap(wrap_root), Wrap(wrap_layers)}) {
        for (const auto reshard : {std::optional<bool>(), std::optional<bool>(true), std::optional<bool>(false)}) {
          run_ranks(
              world, [&](Rank& rank) { train(rank, widths, sharded_on(rank).reshard_after_forward(reshard), wrap); });
        }
      }
    }
  }
}

} // namespace shardwise::test
