// A process that a rank forks, to save a snapshot or to load data, while the rank trains on (T44).
#include "ranks/sharded_models.h"

#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <iostream>

namespace shardwise::test {
namespace {

std::string text_of(const std::function<void()>& act) {
  try {
    act();
    return "no error";
  } catch (const std::exception& error) {
    return error.what();
  }
}

struct Training {
  explicit Training(Rank& rank) : rank(rank) {}

  void step(int number) {
    optimizer->zero_grad();
    theirs->zero_grad();
    ours->forward(batch(number, rank.rank(), 6)).pow(2).mean().backward();
    reference_backward(rank, [&](int r) { return reference->forward(batch(number, r, 6)).pow(2).mean(); });
    optimizer->step();
    theirs->step();
  }
  void wrap(const std::function<void(torch::nn::Sequential&)>& act) {
    act(ours);
    optimizer = std::make_unique<torch::optim::SGD>(ours->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
    theirs = std::make_unique<torch::optim::SGD>(reference->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
  }

  Rank& rank;
  torch::nn::Sequential ours = mlp({6, 8, 4});
  torch::nn::Sequential reference = mlp({6, 8, 4});
  std::unique_ptr<torch::optim::SGD> optimizer;
  std::unique_ptr<torch::optim::SGD> theirs;
};

/// What is wrong in the child: nothing where this is empty.
std::string look_as_child(Training& training, const std::vector<torch::Tensor>& values, bool are_shared) {
  const auto parameters = training.ours->parameters();
  for (size_t i = 0; i < parameters.size(); ++i) {
    const auto use = text_of([&] {
      const torch::NoGradGuard guard;
      TORCH_CHECK(torch::equal(parameters[i], values[i]), "parameter ", i, " is not what it was at the fork");
      parameters[i].add_(1);
    });
    if (use.find(are_shared ? "forked from a rank" : "no error") == std::string::npos) return use;
  }
  const auto gradient = text_of([&] { parameters[0].grad().sum().item<float>(); });
  if (gradient.find("forked from a rank") == std::string::npos) return "a gradient: " + gradient;
  // A replicated unit has nothing to gather; torch itself runs no backward in a child.
  const auto step = text_of([&] {
    unit(*training.ours).reshard();
    training.step(7);
  });
  if (step.find("forked from a rank") == std::string::npos && step.find("Autograd-and-Fork") == std::string::npos) {
    return "a step: " + step;
  }
  const auto group = training.rank.mesh().group("world");
  std::vector<torch::Tensor> one{torch::ones({1})};
  const auto sum = text_of([&] { group->allreduce(one)->wait(); });
  if (sum.find("forked from a rank") == std::string::npos) return "an all-reduce: " + sum;
  return "";
}

void fork_while_training(
    Rank& rank, const std::function<void(torch::nn::Sequential&)>& wrap, const std::string& name, bool are_shared) {
  Training training(rank);
  training.wrap(wrap);
  for (int step = 0; step < 2; ++step) training.step(step);
  std::vector<torch::Tensor> values;
  for (const auto& parameter : training.ours->parameters()) values.push_back(parameter.detach().clone());
  std::array<int, 2> trained{};
  ASSERT_EQ(pipe(trained.data()), 0);
  const auto child = fork();
  if (child == 0) {
    char byte = 0;
    const bool told = read(trained[0], &byte, 1) == 1;
    const auto problem = told ? look_as_child(training, values, are_shared) : "the parent is gone";
    if (!problem.empty()) std::cerr << rank.name() << ", " << name << ", in the child: " << problem << std::endl;
    _exit(problem.empty() ? 0 : 1);
  }
  for (int step = 2; step < 4; ++step) training.step(step);
  ASSERT_EQ(write(trained[1], "x", 1), 1);
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0) << name;
  training.step(4);
  for (const int end : trained) close(end);
  const auto expected = training.reference->named_parameters();
  for (const auto& entry : full_state_dict(training.ours)) {
    assert_close(entry.value(), expected[entry.key()].detach(), name + ": " + entry.key());
  }
}

} // namespace

TEST(Forked, AChildHasWhatItsParentHadOrAnErrorAndChangesNothing) {
  run_processes(2, [](Rank& rank) {
    const auto shard = [&](const FullyShardOptions& options) {
      return [=](torch::nn::Sequential& model) { fully_shard(model, options); };
    };
    fork_while_training(rank, shard(sharded_on(rank)), "rows", true);
    fork_while_training(rank, shard(sharded_on(rank).reshard_after_forward(false)), "kept", true);
    fork_while_training(rank, shard(sharded_on(rank).layout(ShardLayout::flat)), "flat", true);
    fork_while_training(
        rank, [&](torch::nn::Sequential& model) { replicate(model, ReplicateOptions().mesh(rank.mesh())); },
        "replicate", false);
  });
}

} // namespace shardwise::test
