// full_optimizer_state_dict() and load_full_optimizer_state_dict(): what one process keeps, on any ranks.
#include "ranks/optimizer_settings.h"

#include "support/expect.h"

namespace shardwise::test {
namespace {

std::vector<OptimizerPair> all_optimizer_pairs() {
  auto pairs = optimizer_pairs();
  pairs.push_back(optimizer_pair<torch::optim::Adagrad, torch::optim::Adagrad>(
      "Adagrad", torch::optim::AdagradOptions(0.02).initial_accumulator_value(0.1)));
  pairs.push_back(optimizer_pair<torch::optim::RMSprop, torch::optim::RMSprop>(
      "RMSprop", torch::optim::RMSpropOptions(0.002).momentum(0.5).centered(true).eps(0.01)));
  return pairs;
}

void assert_optimizer_state(const StateDict& ours, const StateDict& expected, const std::string& what) {
  ASSERT_EQ(ours.keys(), expected.keys()) << what;
  for (const auto& item : expected) {
    assert_close(ours[item.key()], item.value(), what + ": " + item.key());
  }
}

StateDict dict_without(const StateDict& dict, const std::function<bool(const std::string&)>& is_left_out) {
  StateDict rest;
  for (const auto& item : dict) {
    if (!is_left_out(item.key())) rest.insert(item.key(), item.value());
  }
  return rest;
}

} // namespace

TEST(OptimizerStateDict, IsLoadedOntoEveryWrapping) {
  // What one process saved, in another wrapping or in another order of groups, goes on as that process does.
  on_worlds([](Rank& rank) {
    for (const auto& pair : all_optimizer_pairs()) {
      for (const auto& [name, wrap] : stack_wrappings()) {
        if (pair.name != "AdamW" && name != "rows") continue;
        const auto what = pair.name + ", " + name;
        rank.step(what);
        Beside both(rank, pair, [&](Stack& model) { wrap(model, rank); });
        both.train(50, 1);
        assert_optimizer_state(
            full_optimizer_state_dict(both.ours, *both.mine), full_optimizer_state_dict(both.reference, *both.theirs),
            what);
        // One process alone, with something that it kept before.
        for (int step = 0; step < 2; ++step) {
          both.theirs->zero_grad();
          reference_backward(rank, [&](int r) { return stack_loss(both.reference, step, r); });
          both.theirs->step();
        }
        both.theirs->param_groups()[0].options().set_lr(0.01);
        load_full_state_dict(both.ours, full_state_dict(both.reference));
        const auto dict = full_optimizer_state_dict(both.reference, *both.theirs);
        const auto result =
            load_full_optimizer_state_dict(both.ours, *both.mine, rank.rank() == 0 ? dict : StateDict());
        ASSERT_TRUE(result.missing.empty() && result.unexpected.empty());
        assert_optimizer_state(full_optimizer_state_dict(both.ours, *both.mine), dict, what);
        for (int step = 3; step < 6; ++step) {
          both.train(step, 1);
          assert_state(full_state_dict(both.ours), plain_state(*both.reference), c10::str(what, ", step ", step));
        }
      }
    }
  });
}

TEST(OptimizerStateDict, OnAMeshOfTwoAxesAndWithTheDictOnEveryRank) {
  run_ranks(4, [](Rank& rank) {
    const auto mesh = rank.mesh({{"copies", 2}, {"shards", 2}});
    for (const bool from_rank0 : {true, false}) {
      const auto pair = optimizer_pairs().front();
      Beside both(rank, pair, [&](Stack& model) { shard_stack(model, FullyShardOptions().mesh(mesh)); });
      both.train(0, 2);
      const auto dict = full_optimizer_state_dict(both.ours, *both.mine);
      assert_optimizer_state(dict, full_optimizer_state_dict(both.reference, *both.theirs), "two axes");
      auto fresh = pair.ours(both.ours->parameters());
      load_full_optimizer_state_dict(both.ours, *fresh, dict, LoadStateDictOptions().broadcast_from_rank0(from_rank0));
      both.mine = std::move(fresh);
      both.train(2, 2);
      assert_state(full_state_dict(both.ours), plain_state(*both.reference), "the end");
    }
  });
}

TEST(OptimizerStateDict, OnRank0AndOnTheCpu) {
  on_worlds([](Rank& rank) {
    Beside both(rank, optimizer_pairs().front(), [&](Stack& model) { shard_stack(model, sharded_on(rank)); });
    both.train(0, 2);
    const auto dict =
        full_optimizer_state_dict(both.ours, *both.mine, FullStateDictOptions().rank0_only(true).cpu_offload(true));
    if (rank.rank() > 0) {
      ASSERT_TRUE(dict.is_empty());
      return;
    }
    for (const auto& item : dict) ASSERT_TRUE(item.value().device().is_cpu()) << item.key();
    ASSERT_EQ(dict["state.head.weight.exp_avg"].sizes(), (std::vector<int64_t>{11, 6}));
  });
}

TEST(OptimizerStateDict, ParametersThatWereNeverUsedHaveOptionsAlone) {
  on_worlds([](Rank& rank) {
    Branches ours;
    fully_shard(ours, sharded_on(rank));
    AdamW optimizer(ours->parameters(), torch::optim::AdamWOptions(0.02));
    const auto step = [&](const std::vector<std::string>& use) {
      optimizer.zero_grad();
      ours->forward(batch(0, rank.rank(), 3), use).pow(2).sum().backward();
      optimizer.step();
    };
    step({"left"});
    const auto dict = full_optimizer_state_dict(ours, optimizer);
    ASSERT_TRUE(dict.contains("state.left.weight.exp_avg"));
    ASSERT_FALSE(dict.contains("state.right.weight.exp_avg"));
    ASSERT_TRUE(dict.contains("param_groups.right.weight.betas"));
    step({"left", "right"});
    load_full_optimizer_state_dict(ours, optimizer, dict);
    assert_optimizer_state(full_optimizer_state_dict(ours, optimizer), dict, "loaded over more");
  });
}

TEST(OptimizerStateDict, WhatDoesNotFitIsNamedOnAllRanks) {
  on_worlds([](Rank& rank) {
    Beside both(rank, optimizer_pairs().front(), [&](Stack& model) { shard_stack(model, sharded_on(rank)); });
    both.train(0, 1);
    const auto dict = full_optimizer_state_dict(both.ours, *both.mine);
    const auto refused = [&](const StateDict& given, const std::vector<std::string>& parts) {
      expect_error<Error>([&] { load_full_optimizer_state_dict(both.ours, *both.mine, given); }, parts);
      assert_optimizer_state(full_optimizer_state_dict(both.ours, *both.mine), dict, "nothing was loaded");
    };
    auto wrong = dict;
    wrong["state.head.weight.exp_avg"] = torch::zeros({6, 11});
    wrong["param_groups.head.weight.betas"] = torch::zeros({3});
    wrong["param_groups.embedding.weight.lr"] = torch::tensor(0.5);
    wrong.insert("state.tail.weight.exp_avg", torch::zeros({1}));
    refused(
        wrong, {"the optimizer's state dict of rank 0 does not fit this AdamW, and nothing was loaded",
                "not in the optimizer: state.tail.weight.exp_avg",
                "'state.head.weight.exp_avg' has shape [11, 6] here and [6, 11] in the dict",
                "'param_groups.head.weight.betas' has 2 numbers here and 3 in the dict",
                "differ in the dict, but both parameters are in group 0"});
    refused(
        dict_without(dict, [](const auto& key) { return key == "state.head.weight.exp_avg_sq"; }),
        {"'state.head.weight.exp_avg_sq' is missing beside the rest of its parameter's state"});
    const auto part = dict_without(dict, [](const auto& key) { return key.find("head.weight") != std::string::npos; });
    refused(part, {"missing in the dict: param_groups.head.weight.lr"});
    // Some of it alone: the rest stays as it is.
    both.train(1, 1);
    const auto later = full_optimizer_state_dict(both.ours, *both.mine);
    const auto result =
        load_full_optimizer_state_dict(both.ours, *both.mine, part, LoadStateDictOptions().strict(false));
    ASSERT_EQ(result.missing.size(), 5U) << "the options of one parameter";
    const auto now = full_optimizer_state_dict(both.ours, *both.mine);
    assert_close(now["state.head.weight.exp_avg"], later["state.head.weight.exp_avg"], "what the dict lacks");
    assert_close(now["state.embedding.weight.exp_avg"], dict["state.embedding.weight.exp_avg"], "what it has");
    ASSERT_EQ(now["state.embedding.weight.step"].item<float>(), 1);
    ASSERT_EQ(now["state.head.weight.step"].item<float>(), 2);
  });
}

TEST(OptimizerStateDict, OptimizersThatDoNotBelongToTheModule) {
  on_worlds([](Rank& rank) {
    Stack ours, others;
    shard_stack(ours, sharded_on(rank));
    AdamW optimizer(others->parameters(), torch::optim::AdamWOptions(0.02));
    expect_error<Error>(
        [&] { full_optimizer_state_dict(ours, optimizer); },
        {"parameter 0 of group 0 of this AdamW is not a parameter of the module", "parameters()"});
    expect_error<Error>(
        [&] { load_full_optimizer_state_dict(ours, optimizer, StateDict()); }, {"is not a parameter of the module"});
    torch::optim::LBFGS lbfgs(ours->parameters());
    expect_error<ValueError>([&] { full_optimizer_state_dict(ours, lbfgs); }, {"LBFGS", "AdamW"});
    // Ranks that keep different things.
    AdamW mine(ours->parameters(), torch::optim::AdamWOptions(0.02).amsgrad(rank.rank() == 1));
    stack_loss(ours, 0, rank.rank()).backward();
    mine.step();
    expect_error<Error>(
        [&] { full_optimizer_state_dict(ours, mine); }, {"which keeps 40 tensors", "which keeps 60 tensors"});
  });
}

} // namespace shardwise::test
