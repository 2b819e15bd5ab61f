// replicate() of tensors that no module holds: gradients are averaged, whatever computes with them.
#include "ranks/models.h"
#include "support/expect.h"

namespace shardwise::test {
namespace {

/// A linear layer and a scale, as leaves.
std::vector<at::Tensor> leaves(int64_t rows, at::Device device) {
  // A generator of its own: ranks are threads.
  const auto random = generator(3);
  std::vector<at::Tensor> made{torch::randn({rows, 3}, random), torch::randn({rows}, random), torch::full({1}, 0.5)};
  for (auto& tensor : made) tensor = tensor.to(device).requires_grad_();
  return made;
}

at::Tensor loss_of(const std::vector<at::Tensor>& tensors, int step, int rank) {
  const auto x = batch(step, rank, 3).to(tensors[0].device());
  return (torch::linear(x, tensors[0], tensors[1]) * tensors[2]).pow(2).mean();
}

} // namespace

TEST(ReplicateTensors, GrowAndShrinkBetweenSteps) {
  run_ranks(3, [](Rank& rank) {
    auto ours = leaves(4, rank.mesh().device());
    auto reference = leaves(4, rank.mesh().device());
    {
      // Rank 0's values count.
      const torch::NoGradGuard no_grad;
      if (rank.rank() > 0) ours[1].fill_(7);
    }
    // What stays keeps its unit, and its state in the optimizer.
    const auto kept = replicate(std::vector<at::Tensor>{ours[2]}, on(rank));
    auto unit = replicate(std::vector<at::Tensor>{ours[0], ours[1]}, on(rank));
    std::vector<c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>> before;
    for (int step = 0; step < 12; ++step) {
      loss_of(ours, step, rank.rank()).backward();
      reference_backward(rank, [&](int r) { return loss_of(reference, step, r); });
      for (size_t i = 0; i < ours.size(); ++i) {
        EXPECT_TRUE(torch::allclose(ours[i], reference[i])) << "value " << i << " in step " << step;
        EXPECT_TRUE(torch::allclose(ours[i].grad(), reference[i].grad())) << "gradient " << i << " in step " << step;
      }
      // As a program does that splits and drops rows.
      for (auto* tensors : {&ours, &reference}) {
        for (size_t i : {0, 1}) {
          const auto old = tensors->at(i).detach();
          const auto made =
              step % 3 == 2 ? old.narrow(0, 0, old.size(0) - 3).clone() : torch::cat({old, old.narrow(0, 0, 2) / 2});
          if (tensors == &ours) before.emplace_back(ours[i].getIntrusivePtr());
          tensors->at(i) = made.requires_grad_();
        }
        tensors->at(2).mutable_grad().reset();
      }
      unit = replicate(std::vector<at::Tensor>{ours[0], ours[1]}, on(rank));
    }
    EXPECT_EQ(ours[0].size(0), 8);
    // Nothing of the engine keeps what was replaced.
    for (const auto& tensor : before) EXPECT_TRUE(tensor.expired());
  });
}

TEST(ReplicateTensors, WhatCannotWorkIsRefused) {
  run_ranks(2, [](Rank& rank) {
    const auto tensors = leaves(4, rank.mesh().device());
    const auto refuses = [&](const std::vector<at::Tensor>& given, const std::string& text, ReplicateOptions options) {
      expect_error<ValueError>([&] { replicate(given, options); }, {text});
    };
    refuses({tensors[0], at::Tensor()}, "'tensors[1]' is undefined", on(rank));
    refuses({tensors[0].detach()}, "'tensors[0]' needs no gradient", on(rank));
    refuses({tensors[0] * 2}, "'tensors[0]' is the result of operations", on(rank));
    refuses(
        {tensors[0]}, "no mixed precision of parameters",
        on(rank).mixed_precision(MixedPrecision().param_dtype(at::kBFloat16)));
    torch::OrderedDict<std::string, at::Tensor> named;
    named.insert("layer.weight", rank.rank() == 0 ? tensors[0] : tensors[1]);
    expect_error<Error>([&] { replicate(named, on(rank)); }, {"layer.weight"});
  });
}

} // namespace shardwise::test
