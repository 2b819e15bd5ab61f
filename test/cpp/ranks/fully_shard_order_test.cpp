// Ranks that run units differently: all of them get an error with names, at once, and never a wrong sum.
#include "ranks/fully_shard_models.h"

namespace shardwise::test {
namespace {

/// Equal blocks: gathers that are mixed up have the same sizes, and nothing but the agreement would notice.
struct TwinsImpl : torch::nn::Module {
  TwinsImpl() {
    fill(*this);
  }
  torch::Tensor forward(torch::Tensor x, const std::string& order) {
    for (const char which : order) {
      if (which == '!') throw std::runtime_error("the program's own error");
      x = torch::tanh((which == 'a' ? a : which == 'b' ? b : c)->forward(x));
    }
    return x;
  }
  torch::nn::Linear a = register_module("a", torch::nn::Linear(4, 4));
  torch::nn::Linear b = register_module("b", torch::nn::Linear(4, 4));
  torch::nn::Linear c = register_module("c", torch::nn::Linear(4, 4));
};
TORCH_MODULE(Twins);

std::vector<Unit> shard_twins(Twins& model, const FullyShardOptions& options) {
  std::vector<Unit> units;
  for (const auto& child : model->children()) units.push_back(fully_shard(*child, options));
  units.push_back(fully_shard(model, options));
  return units;
}

auto loss_of(const std::string& order) {
  return [order](Twins& model, int step, int r) { return model->forward(batch(step, r, 4), order).pow(2).sum(); };
}

/// Runs it and closes the rank's mesh after its model is gone: what a peer still waits for then ends at once.
void closing(int world, const std::function<void(Rank&)>& fn) {
  run_ranks(world, [&](Rank& rank) {
    fn(rank);
    rank.close();
  });
}

/// `differ` runs on the last rank in place of the last step; all ranks must get an error with these parts.
void expect_disagreement(
    int world, const std::function<void(Twins&, std::vector<Unit>&, int)>& differ,
    const std::vector<std::string>& parts, const std::vector<std::string>& warm_up = {"abc", "abc", "abc"}) {
  closing(world, [&](Rank& rank) {
    Twins ours;
    auto units = shard_twins(ours, sharded_on(rank));
    Pair<Twins> both{rank, ours, Twins()};
    int step = 0;
    for (const auto& order : warm_up) both.train(loss_of(order), 1, step++);
    const auto last_steps = [&] {
      if (rank.rank() == world - 1) differ(ours, units, step);
      loss_of(warm_up.empty() ? "abc" : warm_up.front())(ours, step, rank.rank()).backward();
      loss_of("abc")(ours, step + 1, rank.rank()).backward();
    };
    auto all = parts;
    all.push_back("the ranks do not run the same units in the same order");
    expect_error<Error>(last_steps, all);
  });
}

} // namespace

TEST(FullyShardOrder, ForwardInAnotherOrder) {
  // T01, T02, R23: silent without the check, for all units are of one size.
  const auto swapped = [](Twins& model, std::vector<Unit>&, int step) { loss_of("acb")(model, step, 1).backward(); };
  for (const int world : {2, 3}) {
    expect_disagreement(world, swapped, {"all-gather of unit 'b' (b.weight", "all-gather of unit 'c' (c.weight"});
  }
  expect_disagreement(2, swapped, {"unit 'b'", "unit 'c'"}, {});
  // Both ways are known: a rank that takes either compares.
  expect_disagreement(2, swapped, {"unit 'b'", "unit 'c'"}, {"abc", "acb", "abc", "acb"});
}

TEST(FullyShardOrder, AUnitLeftOut) {
  const auto skip = [](Twins& model, std::vector<Unit>&, int step) { loss_of("ac")(model, step, 1).backward(); };
  expect_disagreement(2, skip, {"unit 'b'", "of units 'c', 'a', but not of 'b'"});
}

TEST(FullyShardOrder, NoBackwardOnOneRank) {
  const auto forward_alone = [](Twins& model, std::vector<Unit>&, int step) { loss_of("abc")(model, step, 1); };
  expect_disagreement(
      2, forward_alone,
      {"rank 0 waits for the all-gather of unit 'b'", "rank 1 is about to start the all-gather of unit 'a'"});
}

TEST(FullyShardOrder, EvaluationOnOneRank) {
  const auto evaluate = [](Twins& model, std::vector<Unit>&, int step) {
    const torch::NoGradGuard guard;
    loss_of("abc")(model, step, 1);
    loss_of("abc")(model, step, 1);
  };
  expect_disagreement(
      2, evaluate,
      {"rank 1 is about to start the all-gather of unit 'a'", "in a forward without gradients",
       "all ranks must take part in an evaluation too"});
}

TEST(FullyShardOrder, NoSynchronisationOnOneRank) {
  const auto no_sync = [](Twins& model, std::vector<Unit>& units, int step) {
    units.back().set_requires_gradient_sync(false);
    loss_of("abc")(model, step, 1).backward();
    units.back().set_requires_gradient_sync(true);
  };
  expect_disagreement(
      2, no_sync,
      {"rank 0 waits for", "rank 1 is about to start a backward that sums no gradients (units 'c', 'b', 'a', '')"});
}

TEST(FullyShardOrder, AnOperationOnOneRank) {
  // T05: a look at a full parameter is a gather.
  const auto look = [](Twins& model, std::vector<Unit>&, int) { model->c->weight.norm(); };
  expect_disagreement(2, look, {"unit 'a'", "unit 'c'"});
}

TEST(FullyShardOrder, AWrapOnOneRank) {
  closing(2, [](Rank& rank) {
    Twins ours;
    shard_twins(ours, sharded_on(rank));
    Pair<Twins>{rank, ours, Twins()}.train(loss_of("abc"), 2);
    const auto differ = [&] {
      Twins another;
      if (rank.rank() == 1) shard_twins(another, sharded_on(rank));
      loss_of("abc")(ours, 5, rank.rank()).backward();
    };
    expect_error<Error>(differ, {"do not run the same units", "fully_shard() of weight", "unit 'a'"});
  });
}

TEST(FullyShardOrder, ModelsOnOtherGroupsGoOn) {
  closing(2, [](Rank& rank) {
    Twins ours;
    shard_twins(ours, sharded_on(rank));
    Twins another;
    shard_twins(another, FullyShardOptions().mesh(rank.mesh({{"other", 2}})));
    Pair<Twins> both{rank, another, Twins()};
    both.train(loss_of("abc"), 1, 0);
    const auto differ = [&] {
      loss_of("abc")(ours, 0, rank.rank());
      if (rank.rank() == 0) loss_of("abc")(ours, 0, 0);
      loss_of("abc")(ours, 1, rank.rank()).backward();
      loss_of("abc")(ours, 2, rank.rank()).backward();
    };
    const std::vector<std::string> parts{
        "nothing can run on this mesh's process groups any more. Models on other process groups go on",
        "make new process groups and a new mesh, and wrap the model anew"};
    expect_error<Error>(differ, parts);
    expect_error<Error>([&] { loss_of("abc")(ours, 3, rank.rank()); }, parts);
    both.train(loss_of("abc"), 2, 1);
  });
}

TEST(FullyShardOrder, SameWayAfterAnErrorThatStoppedAllRanksInTime) {
  // No collective was under way: the ranks can go on.
  run_ranks(2, [](Rank& rank) {
    Twins ours;
    auto units = shard_twins(ours, sharded_on(rank));
    const auto differ = [&] { loss_of(rank.rank() == 0 ? "abc" : "bca")(ours, 0, rank.rank()).backward(); };
    expect_error<Error>(differ, {"unit 'a'", "unit 'b'", "is about to start"});
    units.back().reset();
    ours->zero_grad();
    Pair<Twins>{rank, ours, Twins()}.train(loss_of("abc"), 3);
  });
}

TEST(FullyShardOrder, NothingIsComparedOnceAProgramIsSteady) {
  run_ranks(2, [](Rank& rank) {
    Twins ours;
    auto root = shard_twins(ours, sharded_on(rank)).back();
    Pair<Twins> both{rank, ours, Twins()};
    both.train(loss_of("abc"), 2);
    const auto before = root.counters();
    ASSERT_GT(before.comparisons, 6);
    both.train(loss_of("abc"), 3, 2);
    ASSERT_EQ(root.counters().comparisons, before.comparisons);
    ASSERT_GT(root.counters().all_gathers, before.all_gathers);
    // A second way is compared where the two part, and only there.
    both.train(loss_of("acb"), 1, 5);
    both.train(loss_of("abc"), 1, 6);
    const auto learnt = root.counters().comparisons;
    both.train(loss_of("abc"), 1, 7);
    ASSERT_GT(root.counters().comparisons, learnt);
    ASSERT_LT(root.counters().comparisons, learnt + 8);
  });
}

TEST(FullyShardOrder, HowOftenInARowMayDiffer) {
  // T04
  run_ranks(2, [](Rank& rank) {
    Twins ours;
    shard_twins(ours, sharded_on(rank));
    Pair<Twins>{rank, ours, Twins()}.train(
        [](Twins& model, int step, int r) {
          return model->forward(batch(step, r, 4), r == 0 ? "abbbc" : "abcc").pow(2).sum();
        },
        4);
  });
}

TEST(FullyShardOrder, AUnitThatIsDoneEarlierOnSomeRanks) {
  // T01: its sum waits on one rank until the very end; the others must not wait for it before they gather what that
  // rank needs.
  struct LateImpl : torch::nn::Module {
    torch::Tensor scale = register_parameter("scale", torch::ones({4}));
    torch::nn::Linear early = register_module("early", torch::nn::Linear(4, 4));
    torch::nn::Linear late = register_module("late", torch::nn::Linear(4, 4));
  };
  struct AroundImpl : torch::nn::Module {
    AroundImpl() {
      fill(*this);
      around->scale.set_requires_grad(false);
    }
    torch::Tensor forward(torch::Tensor x, bool all) {
      x = x * around->scale;
      if (all) x = around->early(x);
      x = torch::tanh(b(torch::tanh(a(torch::tanh(x)))));
      return around->late(x);
    }
    torch::nn::Linear a = register_module("a", torch::nn::Linear(4, 4));
    torch::nn::Linear b = register_module("b", torch::nn::Linear(4, 4));
    std::shared_ptr<LateImpl> around = register_module("around", std::make_shared<LateImpl>());
  };
  using Around = torch::nn::ModuleHolder<AroundImpl>;
  run_ranks(3, [](Rank& rank) {
    const auto options = sharded_on(rank);
    Around ours(std::make_shared<AroundImpl>());
    for (auto* block : {&ours->a, &ours->b}) fully_shard(*block, options);
    fully_shard(ours->around, FullyShardOptions(options).reshard_after_forward(false))
        .set_reshard_after_backward(false);
    fully_shard(ours, options);
    Pair<Around>{rank, ours, Around(std::make_shared<AroundImpl>())}.train(
        [](Around& model, int step, int r) { return model->forward(batch(step, r, 4), r == 0).pow(2).sum(); }, 4);
  });
}

} // namespace shardwise::test
