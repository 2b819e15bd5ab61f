// What a program took from its parameters after a cast, a load or to_empty() is the memory that trains, whatever ran in
// between: an average of weights, a checkpoint of aliases, an optimizer.
#include "ranks/state_models.h"

#include <sstream>

namespace shardwise::test {
namespace {

/// Aliases of all parameters, as they are taken without any use of the units.
struct Held {
  explicit Held(Stack& model) {
    for (const auto& entry : model->named_parameters()) {
      names.push_back(entry.key());
      aliases.push_back(entry.value().detach());
      views.push_back(entry.value().view({-1}));
    }
  }

  void assert_are_those_of(Stack& model, const std::string& what) const {
    const auto now = model->named_parameters();
    for (size_t i = 0; i < names.size(); ++i) {
      ASSERT_TRUE(torch::equal(aliases[i], now[names[i]])) << what << ": " << names[i];
      ASSERT_TRUE(torch::equal(views[i], now[names[i]].view({-1}))) << what << ": a view of " << names[i];
      ASSERT_EQ(aliases[i].data_ptr(), now[names[i]].data_ptr()) << what << ": " << names[i];
    }
  }

  std::vector<std::string> names;
  std::vector<torch::Tensor> aliases;
  std::vector<torch::Tensor> views;
};

/// Trains both, and asks after each step whether what is held is what was trained.
void train_held(Rank& rank, Stack& ours, Stack& reference, const std::string& what) {
  const Held held(ours);
  Pair<Stack> both{rank, ours, reference};
  const auto step = [&](int number) {
    both.backward(stack_loss, number);
    both.optimize();
    const auto when = c10::str(what, ", step ", number);
    held.assert_are_those_of(ours, when);
    assert_state(full_state_dict(ours), plain_state(*reference), when);
  };
  for (const int number : {0, 1, 2}) step(number);
  // Somebody writes to what he holds: that is a write to the parameter.
  {
    const torch::NoGradGuard guard;
    for (const auto& alias : held.aliases) alias.mul_(0.5);
    for (auto& parameter : reference->parameters()) parameter.mul_(0.5);
  }
  for (const int number : {3, 4}) step(number);
}

/// A Stack is wrapped in these ways.
void for_wrappings(const std::function<void(Rank&, const std::string&, const FullyShardOptions&)>& fn) {
  run_ranks(2, [&](Rank& rank) {
    fn(rank, "rows", sharded_on(rank));
    fn(rank, "flat", sharded_on(rank).layout(ShardLayout::flat));
    fn(rank, "kept", sharded_on(rank).reshard_after_forward(false));
  });
}

} // namespace

TEST(HeldTensors, AfterToEmpty) {
  for_wrappings([](Rank& rank, const std::string& what, const FullyShardOptions& options) {
    Stack ours = stack_on_meta(), reference;
    shard_stack(ours, options);
    to_empty(ours);
    load_full_state_dict(ours, full_state_dict(*reference));
    train_held(rank, ours, reference, what);
  });
}

// But for the layout `flat`, whose pieces are others in another dtype.
TEST(HeldTensors, AfterACast) {
  for_wrappings([](Rank& rank, const std::string& what, const FullyShardOptions& options) {
    if (options.layout() == ShardLayout::flat) return;
    Stack ours, reference;
    shard_stack(ours, options);
    for (const auto kind : {torch::kDouble, torch::kFloat}) {
      ours->to(kind);
      reference->to(kind);
      train_held(rank, ours, reference, what);
    }
  });
}

// It would be lost: what trains are the shards.
TEST(HeldTensors, AfterACastOfFullParameters) {
  for_wrappings([](Rank& rank, const std::string& what, const FullyShardOptions& options) {
    Stack ours, reference;
    shard_stack(ours, options);
    {
      const torch::NoGradGuard guard;
      stack_loss(ours, 9, rank.rank());
    }
    auto& weight = ours->block(1)->down->weight;
    weight.set_data(torch::zeros(weight.sizes(), torch::kDouble));
    expect_error<Error>(
        [&] { stack_loss(ours, 9, rank.rank()); },
        {c10::str("rank ", rank.rank()), "replaced the memory of the full parameter 'blocks.1.down.weight'",
         "reshard()"});
    train_held(rank, ours, reference, what);
  });
}

TEST(HeldTensors, AfterALoad) {
  for_wrappings([](Rank& rank, const std::string& what, const FullyShardOptions& options) {
    Stack ours, reference;
    shard_stack(ours, options);
    {
      Pair<Stack> both{rank, ours, reference};
      both.backward(stack_loss, 7);
      both.optimize();
    }
    std::stringstream archive;
    torch::save(ours, archive);
    Stack other;
    shard_stack(other, options);
    torch::load(other, archive);
    train_held(rank, other, reference, what);
  });
}

} // namespace shardwise::test
