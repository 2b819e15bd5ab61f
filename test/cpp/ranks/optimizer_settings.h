#pragma once

// Optimizers and wrappings that the tests of optimizers go through.
#include "ranks/state_models.h"

#include <memory>
#include <type_traits>

namespace shardwise::test {

using Parameters = std::vector<torch::Tensor>;

/// One of ours, and torch's own of the same class with the same options.
struct OptimizerPair {
  using Make = std::function<std::unique_ptr<torch::optim::Optimizer>(const Parameters&)>;
  std::string name;
  Make ours;
  Make theirs;
};

template <typename Ours, typename Theirs, typename Options>
OptimizerPair optimizer_pair(const std::string& name, const Options& options) {
  return {
      name, [options](const Parameters& parameters) { return std::make_unique<Ours>(parameters, options); },
      [options](const Parameters& parameters) { return std::make_unique<Theirs>(parameters, options); }};
}

inline std::vector<OptimizerPair> optimizer_pairs() {
  using torch::optim::AdamOptions;
  using torch::optim::AdamWOptions;
  using torch::optim::SGDOptions;
  return {
      optimizer_pair<AdamW, torch::optim::AdamW>("AdamW", AdamWOptions(0.02).weight_decay(0.1)),
      optimizer_pair<AdamW, torch::optim::AdamW>("AdamW, amsgrad", AdamWOptions(0.02).amsgrad(true).betas({0.8, 0.9})),
      optimizer_pair<Adam, torch::optim::Adam>("Adam", AdamOptions(0.02).weight_decay(0.1)),
      optimizer_pair<SGD, torch::optim::SGD>("SGD", SGDOptions(0.05).weight_decay(0.1)),
      optimizer_pair<SGD, torch::optim::SGD>("SGD, momentum", SGDOptions(0.05).momentum(0.9).dampening(0.3)),
      optimizer_pair<SGD, torch::optim::SGD>("SGD, Nesterov", SGDOptions(0.05).momentum(0.9).nesterov(true)),
  };
}

/// A wrapped model that one of ours trains, beside a plain one with torch's own, on the same data.
template <typename Model = Stack>
struct Beside {
  Beside(Rank& rank, const OptimizerPair& pair, const std::type_identity_t<std::function<void(Model&)>>& wrap)
      : rank(rank) {
    wrap(ours);
    mine = pair.ours(ours->parameters());
    theirs = pair.theirs(reference->parameters());
  }
  template <typename Loss>
  void step(const Loss& loss, int number) {
    mine->zero_grad();
    theirs->zero_grad();
    loss(ours, number, rank.rank()).backward();
    reference_backward(rank, [&](int r) { return loss(reference, number, r); });
    mine->step();
    theirs->step();
  }
  void train(int first, int steps) {
    for (int number = first; number < first + steps; ++number) step(stack_loss, number);
  }
  Rank& rank;
  Model ours, reference;
  std::unique_ptr<torch::optim::Optimizer> mine, theirs;
};

struct StackWrapping {
  std::string name;
  std::function<void(Stack& model, Rank& rank)> wrap;
};

inline std::vector<StackWrapping> stack_wrappings() {
  return {
      {"rows", [](Stack& model, Rank& rank) { shard_stack(model, sharded_on(rank)); }},
      {"last dimension",
       [](Stack& model, Rank& rank) { shard_stack(model, sharded_on(rank).shard_placement(last_dimension)); }},
      {"flat", [](Stack& model, Rank& rank) { shard_stack(model, sharded_on(rank).layout(ShardLayout::flat)); }},
      {"kept", [](Stack& model, Rank& rank) { shard_stack(model, sharded_on(rank).reshard_after_forward(false)); }},
      {"in the host's memory",
       [](Stack& model, Rank& rank) { shard_stack(model, sharded_on(rank).cpu_offload(CpuOffload())); }},
      {"replicated", [](Stack& model, Rank& rank) { replicate(model, on(rank)); }},
  };
}

} // namespace shardwise::test
