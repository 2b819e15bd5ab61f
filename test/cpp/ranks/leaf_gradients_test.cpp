// Gradients that a program adds to a full parameter itself, past autograd's hooks, as a pipeline with backwards in two
// parts does it.
#include "ranks/fully_shard_models.h"

#include <torch/csrc/autograd/autograd.h>

namespace shardwise::test {

TEST(LeafGradients, AddedByHand) {
  run_ranks(2, [](Rank& rank) {
    torch::nn::Linear model(6, 4);
    fill(*model);
    const auto options =
        sharded_on(rank).mixed_precision(MixedPrecision().param_dtype(torch::kBFloat16).reduce_dtype(torch::kFloat));
    auto unit = fully_shard(model, options);
    unit.set_reshard_after_backward(false);
    unit.set_requires_gradient_sync(false);
    constexpr int kParts = 8;
    auto total = torch::zeros({4, 6});
    for (int part = 0; part < kParts; ++part) {
      if (part == kParts - 1) unit.set_requires_gradient_sync(true);
      const auto loss = call(model, batch(part, rank.rank(), 6)).pow(2).sum();
      if (part == kParts - 1) {
        loss.backward();
        break;
      }
      auto& leaf = model->weight;
      const auto found = torch::autograd::grad({loss}, {leaf})[0];
      total += found.to(torch::kFloat);
      leaf.mutable_grad() = leaf.grad().defined() ? leaf.grad() + found : found;
    }
    // The last part, as one process has it.
    auto half = torch::nn::Linear(6, 4);
    fill(*half);
    half->to(torch::kBFloat16);
    half->forward(batch(kParts - 1, rank.rank(), 6).to(torch::kBFloat16)).pow(2).sum().backward();
    total += half->weight.grad().to(torch::kFloat);
    std::vector<at::Tensor> sum{total};
    rank.mesh().group("world")->allreduce(sum)->wait();
    const auto mean = sum[0] / 2;
    const auto mine = model->parameters()[0].grad();
    ASSERT_TRUE(mine.defined());
    const auto expected = mean.narrow(0, rank.rank() * 2, 2);
    EXPECT_TRUE(torch::allclose(mine, expected, 1e-6, 1e-5)) << mine << expected;
  });
}

} // namespace shardwise::test
