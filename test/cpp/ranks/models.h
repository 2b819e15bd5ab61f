#pragma once

// Models and data that the tests of replicate share; the C++ twin of test/python/ranks/models.py.
#include "support/form.h"
#include "support/ranks.h"

#include <gtest/gtest.h>
#include <shardwise/shardwise.h>
#include <torch/torch.h>

#include <set>

namespace shardwise::test {

/// As run_ranks(), on each of these numbers of ranks.
inline void on_ranks(
    const std::function<void(Rank&)>& fn, const std::vector<int>& worlds = by_form<std::vector<int>>({3}, {2, 4, 8})) {
  for (const int world : worlds) run_ranks(world, fn);
}

inline at::Generator generator(uint64_t seed) {
  auto result = at::make_generator<at::CPUGeneratorImpl>(seed);
  return result;
}

/// The same values in every rank and in the reference, though ranks are threads that share the default generator.
inline void fill(torch::nn::Module& module, uint64_t seed = 7) {
  const torch::NoGradGuard guard;
  auto random = generator(seed);
  for (auto& parameter : module.parameters()) {
    parameter.copy_(torch::randn(parameter.sizes(), random, parameter.options().requires_grad(false)) * 0.4);
  }
}

inline void set_trained(const torch::nn::Module& module, bool trained) {
  for (auto& parameter : module.parameters()) parameter.set_requires_grad(trained);
}

/// A step of plain SGD.
inline void descend(const torch::nn::Module& module, double lr) {
  torch::optim::SGD optimizer(module.parameters(), lr);
  optimizer.step();
  optimizer.zero_grad();
}

/// Linear layers with tanh between them.
inline torch::nn::Sequential mlp(const std::vector<int64_t>& widths) {
  torch::nn::Sequential layers;
  for (size_t i = 0; i + 1 < widths.size(); ++i) {
    if (i > 0) layers->push_back(torch::nn::Tanh());
    layers->push_back(torch::nn::Linear(widths[i], widths[i + 1]));
  }
  fill(*layers);
  return layers;
}

/// A shared parameter has several names, and is to be stepped once.
inline std::vector<torch::Tensor> each_once(const torch::nn::Module& module) {
  std::vector<torch::Tensor> parameters;
  std::set<at::TensorImpl*> seen;
  for (const auto& parameter : module.parameters()) {
    if (seen.insert(parameter.unsafeGetTensorImpl()).second) parameters.push_back(parameter);
  }
  return parameters;
}

/// A model of which a rank can leave parts out: `use` names the branches that take part in a forward.
struct BranchesImpl : torch::nn::Module {
  BranchesImpl() {
    fill(*this);
  }
  torch::Tensor forward(const torch::Tensor& x, const std::vector<std::string>& use) {
    auto hidden = first->forward(x);
    for (const auto& name : use) hidden = torch::tanh((name == "left" ? left : right)->forward(hidden));
    return hidden;
  }
  torch::nn::Linear first = register_module("first", torch::nn::Linear(3, 4));
  torch::nn::Linear left = register_module("left", torch::nn::Linear(4, 4));
  torch::nn::Linear right = register_module("right", torch::nn::Linear(4, 4));
};
TORCH_MODULE(Branches);

/// Different for every step and rank.
inline torch::Tensor batch(int step, int rank, int64_t width, int64_t rows = 5) {
  return torch::randn({rows, width}, generator(1000 * step + rank));
}

/// One process does what all ranks do: the gradient of the mean of their losses.
inline void reference_backward(const Rank& rank, const std::function<torch::Tensor(int)>& loss_of_rank) {
  for (int r = 0; r < rank.world_size(); ++r) (loss_of_rank(r) / rank.world_size()).backward();
}

inline void assert_close(const torch::Tensor& ours, const torch::Tensor& theirs, const std::string& what) {
  ASSERT_EQ(ours.sizes(), theirs.sizes()) << what;
  ASSERT_EQ(ours.dtype(), theirs.dtype()) << what;
  ASSERT_TRUE(torch::allclose(ours.cpu(), theirs.cpu(), 1e-5, 1e-6)) << what << "\n" << ours << "\n" << theirs;
}

/// Every bit.
inline void assert_equal(const torch::Tensor& ours, const torch::Tensor& theirs, const std::string& what) {
  ASSERT_EQ(ours.dtype(), theirs.dtype()) << what;
  ASSERT_TRUE(torch::equal(ours.cpu(), theirs.cpu())) << what << "\n" << ours << "\n" << theirs;
}

using Compare = void (*)(const torch::Tensor& ours, const torch::Tensor& theirs, const std::string& what);

/// Values and gradients, parameter by parameter, also whether there is a gradient at all.
inline void assert_same(
    const torch::nn::Module& model, const torch::nn::Module& reference, const std::string& what,
    Compare compare = assert_close) {
  const auto expected = reference.named_parameters();
  for (const auto& entry : model.named_parameters()) {
    const auto& ours = entry.value();
    const auto& theirs = expected[entry.key()];
    compare(ours, theirs, what + ": " + entry.key());
    ASSERT_EQ(ours.grad().defined(), theirs.grad().defined()) << what << ": gradient of " << entry.key();
    if (ours.grad().defined()) compare(ours.grad(), theirs.grad(), what + ": gradient of " + entry.key());
  }
}

inline ReplicateOptions on(Rank& rank) {
  return ReplicateOptions().mesh(rank.mesh());
}

} // namespace shardwise::test
