#pragma once

// Linear layers with tanh between them, trained beside a plain model that sees the data of all ranks.
#include "ranks/models.h"

namespace shardwise::test {

using Layers = torch::nn::Sequential;

/// `wrap` is given the model, `check` both of them after each backward and each step of the optimizer.
inline void train_mlp(
    Rank& rank, const std::vector<int64_t>& widths, const std::function<void(Layers& ours)>& wrap,
    const std::function<void(const Layers& ours, const Layers& reference, const std::string& what)>& check) {
  auto ours = mlp(widths);
  auto reference = mlp(widths);
  wrap(ours);
  torch::optim::Adam mine(ours->parameters(), 0.05);
  torch::optim::Adam theirs(reference->parameters(), 0.05);
  for (int step = 0; step < by_form(4, 10); ++step) {
    const auto what = "step " + std::to_string(step);
    rank.step(what);
    mine.zero_grad();
    theirs.zero_grad();
    const auto loss = ours->forward(batch(step, rank.rank(), widths[0])).pow(2).mean();
    loss.backward();
    reference_backward(rank, [&](int r) {
      auto expected = reference->forward(batch(step, r, widths[0])).pow(2).mean();
      EXPECT_TRUE(r != rank.rank() || torch::allclose(loss, expected, 1e-5, 1e-6)) << "loss, " << what;
      return expected;
    });
    check(ours, reference, "before the optimizer, " + what);
    mine.step();
    theirs.step();
    check(ours, reference, what);
  }
}

} // namespace shardwise::test
