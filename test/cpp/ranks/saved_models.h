#pragma once

#include "ranks/hybrid_models.h"

#include <functional>
#include <string>
#include <vector>

// Trainings that are saved, and go on elsewhere.
namespace shardwise::test {

/// How a model is divided among the ranks of a world.
struct Division {
  std::string name;
  int world;
  std::function<void(Rank&, Stack&)> wrap;
};

inline const std::vector<Division>& saved_divisions() {
  static const std::vector<Division> all{
      {"plain", 1, [](Rank&, Stack&) {}},
      {"rows of 2", 2, [](Rank& rank, Stack& model) { shard_stack(model, sharded_on(rank)); }},
      {"flat on 3", 3,
       [](Rank& rank, Stack& model) { shard_stack(model, sharded_on(rank).layout(ShardLayout::flat)); }},
      {"2 copies of 2", 4,
       [](Rank& rank, Stack& model) {
         shard_stack(model, hybrid_on(rank, {2, 2}));
       }},
      {"copies", 2, [](Rank& rank, Stack& model) { replicate(model, on(rank)); }},
      {"one unit of 4", 4, [](Rank& rank, Stack& model) { fully_shard(model, sharded_on(rank)); }},
  };
  return all;
}

/// A model and its optimizer, whole.
struct Whole {
  StateDict model;
  StateDict optimizer;
};

/// The Stack, with a buffer of whole numbers and a parameter that is not trained, and its optimizer.
struct Training {
  Training(Rank& on, const Division& division, double lr)
      : rank(on),
        model(make(on, division)),
        optimizer(model->parameters(), torch::optim::AdamWOptions(lr).weight_decay(0.1)) {}

  void train(int first, int last) {
    for (int step = first; step < last; ++step) {
      optimizer.zero_grad();
      stack_loss(model, step, rank.rank()).backward();
      optimizer.step();
    }
  }
  Whole whole() {
    return {full_state_dict(model), full_optimizer_state_dict(model, optimizer)};
  }

  Rank& rank;
  Stack model;
  torch::optim::AdamW optimizer;

 private:
  static Stack make(Rank& on, const Division& division) {
    Stack made;
    made->register_buffer("count", torch::arange(5));
    made->embedding->weight.requires_grad_(false);
    division.wrap(on, made);
    return made;
  }
};

/// All parameters are zero from now on.
inline void forget(torch::nn::Module& module) {
  const torch::NoGradGuard no_grad;
  for (auto& parameter : module.parameters()) parameter.zero_();
}

inline void expect_same(const StateDict& got, const StateDict& wanted) {
  ASSERT_EQ(got.keys(), wanted.keys());
  for (const auto& item : wanted) {
    EXPECT_TRUE(at::equal(got[item.key()].cpu(), item.value().cpu())) << item.key();
    EXPECT_EQ(got[item.key()].scalar_type(), item.value().scalar_type()) << item.key();
  }
}

inline void expect_same(const Whole& got, const Whole& wanted) {
  expect_same(got.model, wanted.model);
  expect_same(got.optimizer, wanted.optimizer);
}

} // namespace shardwise::test
