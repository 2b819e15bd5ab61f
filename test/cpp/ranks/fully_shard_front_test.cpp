// How units learn what their modules do: by hooks where a call can be seen, by the touch trigger everywhere. Each does
// alone.
#include "ranks/front_switches.h"
#include "ranks/fully_shard_models.h"

#include "group/leaf_storage.h"

namespace shardwise::test {
namespace {

/// Blocks that call their parts through hooks, behind a Sequential's AnyModules.
struct SeenImpl : torch::nn::Module {
  explicit SeenImpl(int64_t width)
      : up(register_module("up", torch::nn::Linear(width, 2 * width))),
        down(register_module("down", torch::nn::Linear(2 * width, width))) {}
  torch::Tensor forward(const torch::Tensor& x) {
    return x + call(down, torch::tanh(call(up, x)));
  }
  torch::nn::Linear up, down;
};
TORCH_MODULE(Seen);

/// The ReLU works in place on outputs of a unit. Backward hooks of modules forbid that, since outputs are then views;
/// those of units do not.
torch::nn::Sequential chain() {
  torch::nn::Sequential model(
      torch::nn::Linear(5, 4), Seen(4), torch::nn::ReLU(torch::nn::ReLUOptions(true)), Seen(4),
      torch::nn::LayerNorm(std::vector<int64_t>{4}), torch::nn::Linear(4, 3));
  fill(*model);
  return model;
}

torch::Tensor chain_loss(torch::nn::Sequential& model, int step, int r) {
  return call(model, batch(step, r, 5)).pow(2).mean();
}

enum class Wrap { root, children, parts };

Unit wrap(torch::nn::Sequential& model, const FullyShardOptions& options, Wrap how) {
  for (const auto& child : model->children()) {
    if (how == Wrap::parts) {
      for (const auto& part : child->children()) fully_shard(*part, options);
    }
    if (how != Wrap::root && !child->parameters().empty()) fully_shard(*child, options);
  }
  return fully_shard(model, options);
}

void train_chain(Rank& rank, const FullyShardOptions& options, Wrap how) {
  rank.step(c10::str("wrap ", static_cast<int>(how)));
  auto ours = chain();
  wrap(ours, options, how);
  Pair<torch::nn::Sequential>{rank, ours, chain()}.train(chain_loss, 4);
}

} // namespace

TEST(FullyShardFront, HooksAlone) {
  const auto switches = front_switches(/*touch=*/false, /*hooks=*/true);
  for (const auto how : {Wrap::root, Wrap::children, Wrap::parts}) {
    for (const auto reshard : {std::optional<bool>(), std::optional<bool>(true), std::optional<bool>(false)}) {
      run_ranks(2, [&](Rank& rank) { train_chain(rank, sharded_on(rank).reshard_after_forward(reshard), how); });
    }
  }
}

TEST(FullyShardFront, HooksAloneAfterALoad) {
  // Kept full copies are out of date, though nobody sees the write to the shards.
  const auto switches = front_switches(/*touch=*/false, /*hooks=*/true);
  run_ranks(2, [](Rank& rank) {
    auto ours = chain(), other = chain();
    fill(*other, 1234);
    wrap(ours, sharded_on(rank).reshard_after_forward(false), Wrap::children);
    const torch::NoGradGuard guard;
    const auto x = batch(0, rank.rank(), 5);
    call(ours, x);
    load_full_state_dict(*ours, full_state_dict(*other));
    assert_close(call(ours, x), call(other, x), "after the load");
    // While gathers of the old values are under way.
    fill(*other, 4321);
    for (const auto& child : ours->children()) {
      if (!child->parameters().empty()) unit(*child).reshard().unshard(/*async=*/true);
    }
    load_full_state_dict(*ours, full_state_dict(*other));
    assert_close(call(ours, x), call(other, x), "after the second load");
  });
}

TEST(FullyShardFront, TouchAlone) {
  const auto switches = front_switches(/*touch=*/true, /*hooks=*/false);
  for (const auto how : {Wrap::root, Wrap::children, Wrap::parts}) {
    run_ranks(2, [&](Rank& rank) {
      train_chain(rank, sharded_on(rank), how);
      stacks(rank, sharded_on(rank)).train(stack_loss, 3);
    });
  }
}

TEST(FullyShardFront, TheBackwardOfAUnitIsSeenBeforeItsFirstOperation) {
  // The outputs' hook unshards the unit, though no operation of its backward reads the parameter: an addition of it.
  struct ShiftImpl : torch::nn::Module {
    torch::Tensor forward(const torch::Tensor& x) {
      return x + shift;
    }
    torch::Tensor shift = register_parameter("shift", torch::ones({4}));
  };
  run_ranks(2, [](Rank& rank) {
    torch::nn::Sequential model(torch::nn::Linear(4, 4), torch::nn::ModuleHolder<ShiftImpl>(), torch::nn::Linear(4, 4));
    fill(*model);
    auto root = wrap(model, sharded_on(rank), Wrap::children);
    auto shift = unit(*model->ptr(1));
    call(model, batch(0, rank.rank(), 4)).sum().backward();
    ASSERT_EQ(shift.counters().unshards, 2);
    shift.set_unshard_in_backward(false);
    call(model, batch(0, rank.rank(), 4)).sum().backward();
    ASSERT_EQ(shift.counters().unshards, 3);
  });
}

TEST(FullyShardFront, OneOperationWithParametersOfTwoUnits) {
  run_ranks(2, [](Rank& rank) {
    Branches ours;
    fully_shard(ours->left, sharded_on(rank));
    fully_shard(ours->right, sharded_on(rank));
    fully_shard(ours, sharded_on(rank));
    pair(rank, ours, Branches()).train([](Branches& model, int step, int r) {
      const auto hidden = torch::tanh(call(model->first, batch(step, r, 3)));
      return torch::linear(hidden, model->left->weight, model->right->bias).pow(2).mean();
    });
  });
}

} // namespace shardwise::test
