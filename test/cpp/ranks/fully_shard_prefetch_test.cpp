// Units are gathered ahead, in the order in which the last pass of the kind used them.
#include "group/leaf_storage.h"
#include "ranks/fully_shard_models.h"
#include "ranks/training_models.h"
#include "support/recorded_calls.h"

namespace shardwise::test {
namespace {

/// What a rank does, a word each: "g1" starts a gather of blocks.1, "f1" ends its forward, "b1" begins its backward.
/// The root is "g" alone.
struct Logged {
  explicit Logged(Rank& rank) : both{rank, Stack(5, 3), Stack(5, 3)} {
    root = shard_stack(both.ours, sharded_on(rank));
    log_gathers(*root);
    for (size_t i = 0; i < 3; ++i) log_gathers(unit(*both.ours->block(i)));
  }

  /// Blocks in that order.
  torch::Tensor loss(Stack& model, const std::string& order, int step, int r) {
    auto x = model->embedding->forward(tokens(step, r));
    if (logs_embedding && model.get() == both.ours.get()) add("e");
    for (const char which : order) {
      x = model->block(static_cast<size_t>(which - '0'))->forward(x, 0.5);
      if (model.get() != both.ours.get()) continue;
      add(std::string("f") + which);
      if (x.requires_grad()) x.register_hook([this, which](const at::Tensor&) { add(std::string("b") + which); });
    }
    return model->head->forward(x).pow(2).mean();
  }

  /// Returns what the forward and the backward did.
  std::string train(const std::string& order) {
    log.clear();
    both.backward([&](Stack& model, int step, int r) { return loss(model, order, step, r); }, step);
    both.finish(step);
    ++step;
    return log;
  }
  std::string evaluate(const std::string& order) {
    log.clear();
    const torch::NoGradGuard guard;
    loss(both.ours, order, step++, both.rank.rank());
    return log;
  }

  void add(const std::string& word) {
    log += log.empty() ? word : " " + word;
  }
  void log_gathers(Unit unit) {
    const auto word = "g" + (unit.name().empty() ? "" : unit.name().substr(unit.name().size() - 1));
    unit.set_custom_all_gather([this, word](at::Tensor& output, at::Tensor& input, c10d::ProcessGroup& group) {
      add(word);
      return group._allgather_base(output, input);
    });
  }

  Pair<Stack> both;
  std::optional<Unit> root;
  std::string log;
  bool logs_embedding = false;
  int step = 0;
};

constexpr auto kOnDemand = "g g0 f0 g1 f1 g2 f2 b2 g2 b1 g1 b0 g0";
constexpr auto kAhead = "g g0 g1 f0 g2 f1 f2 b2 g2 g1 b1 g0 b0";

} // namespace

TEST(FullyShardPrefetch, FollowsTheLastPass) {
  on_ranks([](Rank& rank) {
    Logged run(rank);
    ASSERT_EQ(run.train("012"), kOnDemand);
    for (int i = 0; i < 3; ++i) ASSERT_EQ(run.train("012"), kAhead);
    // A forward without gradients is of another kind. That one is over shows only when a unit runs again.
    ASSERT_EQ(run.evaluate("012"), "g g0 f0 g1 f1 g2 f2");
    ASSERT_EQ(run.evaluate("012"), "g0 g1 f0 g2 f1 f2") << "the root is there";
    ASSERT_EQ("g " + run.train("012"), kAhead);
    run.root->set_prefetch(false);
    run.train("012");
    ASSERT_EQ(run.train("012"), kOnDemand);
    run.root->set_prefetch(true);
    ASSERT_EQ(run.train("012"), kAhead);
  });
}

TEST(FullyShardPrefetch, NoUnitIsGatheredMoreOftenWhateverTheOrder) {
  // Units that run twice, that are left out, that come back.
  const std::vector<std::string> orders{"012", "210", "0102", "02", "1", "00110", "012", "1", "0102", "012"};
  on_ranks(
      [&](Rank& rank) {
        const auto gathers = [](const Logged& run) { return run.root->counters().all_gathers; };
        Logged ahead(rank);
        Logged on_demand(rank);
        on_demand.root->set_prefetch(false);
        for (const auto& order : orders) {
          // The first one after another order may gather a unit that nobody uses.
          for (int step = 0; step < 3; ++step) {
            const auto before = std::pair(gathers(ahead), gathers(on_demand));
            const auto steady = ahead.train(order);
            on_demand.train(order);
            if (step == 0) continue;
            ASSERT_EQ(gathers(ahead) - before.first, gathers(on_demand) - before.second) << order << ": " << steady;
          }
        }
        for (size_t i = 0; i < 3; ++i) {
          ASSERT_TRUE(group::is_freed(ahead.both.ours->block(i)->up->weight)) << "left from a backward: " << i;
        }
        assert_same(*ahead.both.ours, *on_demand.both.ours, "the end", assert_equal);
      },
      {2});
}

TEST(FullyShardPrefetch, WhatIsGatheredByHandIsNotGatheredAhead) {
  on_ranks([](Rank& rank) {
    Logged run(rank);
    for (int i = 0; i < 2; ++i) run.train("012");
    unit(*run.both.ours->block(0)).unshard();
    ASSERT_EQ(run.train("012"), "g f0 g1 g2 f1 f2 b2 g2 g1 b1 g0 b0");
    unit(*run.both.ours->block(0)).unshard(/*async=*/true);
    ASSERT_EQ(run.train("012"), "g g1 f0 g2 f1 f2 b2 g2 g1 b1 g0 b0");
    run.train("012");
    // The root begins each forward, whoever gathered it.
    run.logs_embedding = true;
    for (const bool async : {false, true}) {
      run.root->unshard(async);
      ASSERT_EQ(run.train("012"), "g0 e g1 f0 g2 f1 f2 b2 g2 g1 b1 g0 b0");
    }
  });
}

TEST(FullyShardPrefetch, R26AForwardWithoutGradientsInsideOfAnother) {
  on_ranks([](Rank& rank) {
    Logged run(rank);
    run.both.train(
        [&](Stack& model, int step, int r) {
          const auto inner = [&] {
            const torch::NoGradGuard guard;
            return run.loss(model, "10", step + 70, r);
          };
          return run.loss(model, "01", step, r) * inner() + run.loss(model, "2", step, r);
        },
        5);
  });
}

TEST(FullyShardPrefetch, WithinCallsThatHooksSee) {
  // The end of the root's call is that of a forward: each of several before a backward is one of its own.
  on_ranks([](Rank& rank) {
    auto ours = mlps(8, 3);
    std::string log;
    for (size_t i = 0; i < 3; ++i) {
      fully_shard(ours->ptr(i), sharded_on(rank))
          .set_custom_all_gather([&log, i](auto& output, auto& input, auto& group) {
            log += "g" + std::to_string(i);
            return group._allgather_base(output, input);
          });
      register_forward_hook(
          *ours->ptr(i), [&log, i](torch::nn::Module&, HookTensors&) { log += "f" + std::to_string(i); });
    }
    fully_shard(ours, sharded_on(rank));
    const auto forward = [&](int step) { return call(*ours, batch(step, rank.rank(), 8)).pow(2).sum(); };
    const auto take = [&] { return std::exchange(log, {}); };
    const auto first = forward(0);
    ASSERT_EQ(take(), "g0f0g1f1g2f2");
    const auto second = forward(1);
    ASSERT_EQ(take(), "g0g1f0g2f1f2");
    (first + second).backward();
    take();
    const torch::NoGradGuard guard;
    forward(2);
    ASSERT_EQ(take(), "g0f0g1f1g2f2");
    forward(3);
    ASSERT_EQ(take(), "g0g1f0g2f1f2");
  });
}

TEST(FullyShardPrefetch, AListTakesThePlaceOfTheOrder) {
  on_ranks([](Rank& rank) {
    Logged run(rank);
    auto first = unit(*run.both.ours->block(0));
    const auto last = unit(*run.both.ours->block(2));
    first.set_forward_prefetch({last});
    run.train("012");
    // What the list brought is used later: the order knows nothing of why.
    ASSERT_EQ(run.train("012"), "g g0 g2 f0 g1 f1 f2 b2 g2 g1 b1 g0 b0");
    first.set_forward_prefetch({});
    run.train("012");
    ASSERT_EQ(run.train("012"), kAhead);
  });
}

TEST(FullyShardPrefetch, AfterFailures) {
  on_ranks([](Rank& rank) {
    Logged run(rank);
    run.train("012");
    run.train("012");
    // In forward, after block 0: block 1 is on its way.
    EXPECT_THROW(run.loss(run.both.ours, "0x", 5, rank.rank()), std::exception);
    run.root->reset();
    ASSERT_TRUE(group::is_freed(run.both.ours->block(1)->up->weight));
    ASSERT_EQ(run.train("012"), kAhead);
    // In backward, before block 1.
    const auto loss = run.loss(run.both.ours, "012", 6, rank.rank());
    auto weight = run.both.ours->block(2)->up->weight;
    const auto hook = weight.register_hook([](const at::Tensor&) -> at::Tensor { throw std::runtime_error("no"); });
    EXPECT_THROW(loss.backward(), std::runtime_error);
    weight.remove_hook(hook);
    // Where autograd's own thread ran the backward, the next use cleans up.
    if (!rank.device().is_cpu()) run.root->reset();
    for (size_t i = 0; i < 3; ++i) ASSERT_TRUE(group::is_freed(run.both.ours->block(i)->up->weight));
    run.both.mine->zero_grad();
    run.train("012");
    ASSERT_EQ(run.train("012"), kAhead);
  });
}

TEST(FullyShardLabels, WhatIsGatheredAhead) {
  const RecordedCalls calls;
  run_ranks(2, [](Rank& rank) {
    Stack ours;
    shard_stack(ours, sharded_on(rank));
    for (int step = 0; step < 2; ++step) stack_loss(ours, step, rank.rank()).backward();
  });
  // In the second step, of two ranks.
  const std::map<std::string, int> expected{
      {"FSDP::forward_prefetch for blocks.0", 2},  {"FSDP::forward_prefetch for blocks.1", 2},
      {"FSDP::forward_prefetch for blocks.2", 2},  {"FSDP::backward_prefetch for blocks.1", 2},
      {"FSDP::backward_prefetch for blocks.0", 2},
  };
  auto found = calls.counts();
  std::erase_if(found, [](const auto& entry) { return entry.first.find("_prefetch for ") == std::string::npos; });
  ASSERT_EQ(found, expected);
}

} // namespace shardwise::test
