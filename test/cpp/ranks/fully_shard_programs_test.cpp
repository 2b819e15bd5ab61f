// fully_shard(): the ways in which programs run their modules. All results are those of plain LibTorch.
#include "ranks/fully_shard_models.h"

#include "group/leaf_storage.h"

namespace shardwise::test {
namespace {

Pair<Stack> stacks(Rank& rank, const FullyShardOptions& options) {
  Stack ours;
  shard_stack(ours, options);
  return pair(rank, ours, Stack());
}

} // namespace

TEST(FullyShardPrograms, DirectCallsOfNestedUnits) {
  on_ranks([](Rank& rank) {
    for (const auto reshard : {std::optional<bool>(), std::optional<bool>(true), std::optional<bool>(false)}) {
      stacks(rank, sharded_on(rank).reshard_after_forward(reshard)).train(stack_loss);
    }
  });
}

TEST(FullyShardPrograms, UnitsInUnits) {
  on_ranks([](Rank& rank) {
    Stack ours;
    for (size_t i = 0; i < 3; ++i) {
      fully_shard(ours->block(i)->up, sharded_on(rank));
      fully_shard(ours->block(i), sharded_on(rank));
    }
    fully_shard(ours->blocks, sharded_on(rank));
    fully_shard(ours, sharded_on(rank));
    pair(rank, ours, Stack()).train(stack_loss);
  });
}

TEST(FullyShardPrograms, AUnitOfSeveralModules) {
  on_ranks([](Rank& rank) {
    Stack ours;
    shard_blocks(ours, sharded_on(rank));
    fully_shard({ours->embedding.ptr(), ours->head.ptr()}, sharded_on(rank));
    // A root without parameters of its own.
    const auto root = fully_shard(ours, sharded_on(rank));
    ASSERT_EQ(root.plan().units.back().groups.size(), 0U);
    pair(rank, ours, Stack()).train(stack_loss);
  });
}

TEST(FullyShardPrograms, ShardPlacement) {
  on_ranks([](Rank& rank) {
    const auto largest = [](const std::string&, const torch::Tensor& parameter) -> std::optional<int64_t> {
      return parameter.dim() > 1 && parameter.size(1) > parameter.size(0) ? 1 : 0;
    };
    Stack ours;
    shard_stack(ours, sharded_on(rank).shard_placement(largest));
    auto both = pair(rank, ours, Stack());
    for (const auto& entry : both.reference->named_parameters()) both.dims[entry.key()] = *largest("", entry.value());
    ASSERT_EQ(both.dims["blocks.0.down.weight"], 1);
    both.train(stack_loss);
  });
}

TEST(FullyShardPrograms, FlatLayout) {
  // The pieces of a parameter, in the order of the ranks, are its elements.
  for (const int world : by_form<std::vector<int>>({1, 2, 3}, {1, 2, 3, 4})) {
    std::vector<std::vector<torch::Tensor>> values(world), gradients(world);
    Stack reference;
    run_ranks(world, [&](Rank& rank) {
      Stack ours;
      shard_stack(ours, sharded_on(rank).layout(ShardLayout::flat));
      torch::optim::AdamW optimizer(ours->parameters(), torch::optim::AdamWOptions(0.02));
      for (int step = 0; step < 4; ++step) {
        optimizer.zero_grad();
        stack_loss(ours, step, rank.rank()).backward();
        optimizer.step();
      }
      for (const auto& parameter : ours->parameters()) {
        ASSERT_EQ(parameter.dim(), 1);
        values[rank.rank()].push_back(parameter.detach().cpu().clone());
        gradients[rank.rank()].push_back(parameter.grad().cpu().clone());
      }
    });
    torch::optim::AdamW optimizer(reference->parameters(), torch::optim::AdamWOptions(0.02));
    for (int step = 0; step < 4; ++step) {
      optimizer.zero_grad();
      for (int r = 0; r < world; ++r) (stack_loss(reference, step, r) / world).backward();
      optimizer.step();
    }
    const auto expected = reference->parameters();
    for (size_t i = 0; i < expected.size(); ++i) {
      std::vector<torch::Tensor> pieces, gradient_pieces;
      for (int r = 0; r < world; ++r) {
        pieces.push_back(values[r].at(i));
        gradient_pieces.push_back(gradients[r].at(i));
      }
      assert_close(torch::cat(pieces), expected[i].detach().flatten(), c10::str("parameter ", i));
      assert_close(torch::cat(gradient_pieces), expected[i].grad().flatten(), c10::str("gradient ", i));
    }
  }
}

TEST(FullyShardPrograms, AModuleAloneAMethodAndRepeats) {
  // T04, T35: one rank runs a block more often than the others, one after the other.
  on_ranks([](Rank& rank) {
    auto both = stacks(rank, sharded_on(rank));
    both.train(stack_loss, 2);
    both.train(
        [](Stack& model, int step, int r) { return model->block(1)->reversed(batch(step, r, 6)).pow(2).mean(); }, 2,
        10);
    both.train(
        [](Stack& model, int step, int r) {
          auto x = model->embedding(tokens(step, r));
          for (int i = 0; i < 2 + r; ++i) x = model->block(1)->forward(x, 0.1 * i);
          return model->head(model->block(0)->forward(x, 0.3)).pow(2).mean();
        },
        3, 20);
    both.train(stack_loss, 2, 30);
  });
}

TEST(FullyShardPrograms, TwoForwardsBeforeOneBackwardAndTwoBackwardsOfOneGraph) {
  on_ranks([](Rank& rank) {
    auto both = stacks(rank, sharded_on(rank));
    both.train([](Stack& model, int step, int r) {
      auto first = stack_loss(model, step, r);
      return first + stack_loss(model, step + 50, r) * first;
    });
    const auto twice = [](Stack& model, int step, int r, double scale) {
      auto loss = stack_loss(model, step, r) * scale;
      loss.backward({}, /*retain_graph=*/true);
      loss.backward();
    };
    twice(both.ours, 90, rank.rank(), 1);
    for (int r = 0; r < rank.world_size(); ++r) twice(both.reference, 90, r, 1.0 / rank.world_size());
    both.check("retain_graph");
  });
}

TEST(FullyShardPrograms, GradientAccumulation) {
  on_ranks([](Rank& rank) {
    Stack ours;
    auto root = shard_stack(ours, sharded_on(rank));
    auto both = pair(rank, ours, Stack());
    for (const bool sync_all : {true, false}) {
      for (int step = 0; step < 3; ++step) {
        const auto before = root.counters().reduce_scatters;
        for (int part = 0; part < 3; ++part) {
          root.set_requires_gradient_sync(sync_all || part == 2);
          both.backward(stack_loss, 10 * step + part);
        }
        ASSERT_EQ(root.counters().reduce_scatters - before, sync_all ? 12 : 4);
        both.check(c10::str("step ", step));
        both.optimize();
      }
    }
  });
}

TEST(FullyShardPrograms, CollectivesOfAStep) {
  on_ranks([](Rank& rank) {
    Stack ours;
    auto root = shard_stack(ours, sharded_on(rank));
    auto both = pair(rank, ours, Stack());
    both.train(stack_loss, 2);
    const auto before = root.counters();
    both.train(stack_loss, 3, 2);
    const auto after = root.counters();
    // In backward the root is there already; the blocks come back.
    ASSERT_EQ(after.all_gathers - before.all_gathers, 3 * (4 + 3));
    ASSERT_EQ(after.reduce_scatters - before.reduce_scatters, 3 * 4);
    ASSERT_EQ(after.all_reduces, before.all_reduces);
    ASSERT_EQ(after.allocations, before.allocations) << "memory is allocated once";
    ASSERT_EQ(after.unshards - before.unshards, after.reshards - before.reshards);
  });
}

TEST(FullyShardPrograms, UnusedOnSomeRanks) {
  // T01, T03: a unit runs on all ranks; which of its parameters are used differs.
  on_ranks([](Rank& rank) {
    Branches ours;
    fully_shard(ours->first, sharded_on(rank));
    fully_shard(ours, sharded_on(rank));
    auto both = pair(rank, ours, Branches());
    both.train(
        [](Branches& model, int step, int r) {
          std::vector<std::string> use{"left"};
          if (step == 1) use = {r == 0 ? "left" : "right"};
          if (step == 2)
            use = r == 0 ? std::vector<std::string>{"right", "left"} : std::vector<std::string>{"left", "right"};
          return model->forward(batch(step, r, 3), use).pow(2).sum();
        },
        4);
  });
}

TEST(FullyShardPrograms, FrozenAndUnfrozen) {
  on_ranks([](Rank& rank) {
    auto both = stacks(rank, sharded_on(rank));
    const auto freeze = [&](const std::string& part, bool trained) {
      for (auto* model : {&both.ours, &both.reference}) {
        for (auto& entry : (*model)->named_parameters()) {
          if (entry.key().find(part) != std::string::npos) entry.value().set_requires_grad(trained);
        }
      }
    };
    both.train(stack_loss, 2);
    freeze("up.weight", false);
    freeze("blocks.1", false);
    both.train(stack_loss, 2, 10);
    freeze("", true);
    both.train(stack_loss, 2, 20);
  });
}

TEST(FullyShardPrograms, FrozenBetweenForwardAndBackward) {
  const auto loss = [](Stack& model, int step, int r) {
    const auto train_block_0 = [&](bool value) {
      for (auto& parameter : model->block(0)->parameters()) parameter.set_requires_grad(value);
    };
    train_block_0(true);
    auto loss = stack_loss(model, step, r);
    train_block_0(step % 2 == 0);
    return loss;
  };
  for (const auto* way : {"sharded", "kept", "replicated"}) {
    run_ranks(2, [&](Rank& rank) {
      Stack ours;
      if (way == std::string("replicated")) {
        replicate(ours, ReplicateOptions().mesh(rank.mesh()));
      } else {
        shard_stack(ours, sharded_on(rank).reshard_after_forward(way != std::string("kept")));
      }
      Pair<Stack> both{rank, ours, Stack()};
      both.shards = way == std::string("replicated") ? 1 : 2;
      for (int step = 0; step < 4; ++step) {
        both.backward(loss, step);
        both.check(c10::str(way, ", step ", step));
        if (step % 2 == 1) both.optimize();
      }
    });
  }
}

TEST(FullyShardPrograms, WrappedInInferenceMode) {
  run_ranks(2, [](Rank& rank) {
    Stack ours;
    {
      const c10::InferenceMode guard;
      shard_stack(ours, sharded_on(rank));
    }
    Pair<Stack>{rank, ours, Stack()}.train(stack_loss, 2);
  });
}

TEST(FullyShardPrograms, EvaluationBetweenStepsAndOptimizerBetweenForwards) {
  // T06: full copies that are kept follow the optimizer. T22: a forward in inference mode leaves nothing behind.
  on_ranks([](Rank& rank) {
    for (const bool reshard : {true, false}) {
      auto both = stacks(rank, sharded_on(rank).reshard_after_forward(reshard));
      const auto evaluate = [&](int step) {
        assert_close(both.ours->forward(tokens(step, 0)), both.reference->forward(tokens(step, 0)), "evaluation");
      };
      for (int step = 0; step < 3; ++step) {
        {
          const c10::InferenceMode guard;
          evaluate(step);
        }
        both.backward(stack_loss, step);
        {
          const torch::NoGradGuard guard;
          evaluate(step + 10);
        }
        both.check("before the optimizer");
        both.optimize();
        const torch::NoGradGuard guard;
        evaluate(step + 20);
        for (auto* model : {&both.ours, &both.reference}) {
          for (auto& parameter : (*model)->parameters()) parameter.mul_(0.9);
        }
        evaluate(step + 30);
      }
    }
  });
}

TEST(FullyShardPrograms, TiedWeights) {
  on_ranks([](Rank& rank) {
    Stack ours(6, 2, /*tied=*/true);
    shard_stack(ours, sharded_on(rank));
    auto both = pair(rank, ours, Stack(6, 2, true));
    both.dims["head.weight"] = -1;
    both.train(stack_loss);
    ASSERT_FALSE(ours->named_parameters()["head.weight"].grad().defined());
  });
}

TEST(FullyShardPrograms, AnL2TermZeroGradAndTheNorm) {
  // T15: the term over parameters() is of each rank's own shards.
  on_ranks([](Rank& rank) {
    auto both = stacks(rank, sharded_on(rank));
    for (int step = 0; step < 4; ++step) {
      auto penalty = torch::zeros({});
      for (const auto& parameter : both.ours->parameters()) penalty = penalty + parameter.pow(2).sum();
      (stack_loss(both.ours, step, rank.rank()) + penalty).backward();
      reference_backward(rank, [&](int r) {
        auto whole = torch::zeros({});
        for (const auto& parameter : both.reference->parameters()) whole = whole + parameter.pow(2).sum();
        return stack_loss(both.reference, step, r) + whole;
      });
      both.check(c10::str("step ", step));
      both.mine.step();
      both.theirs.step();
      both.ours->zero_grad(/*set_to_none=*/step % 2 == 0);
      both.reference->zero_grad(step % 2 == 0);
    }
  });
}

TEST(FullyShardPrograms, FailuresAreForgotten) {
  // T12: in forward and in backward; the next steps are right.
  on_ranks([](Rank& rank) {
    auto both = stacks(rank, sharded_on(rank));
    both.train(stack_loss, 1);
    EXPECT_ANY_THROW(both.ours->block(1)->forward(torch::ones({2, 5}), 1));
    both.train(stack_loss, 2, 10);
    auto x = both.ours->block(0)->forward(both.ours->embedding(tokens(20, rank.rank())), 1);
    x.register_hook([](const torch::Tensor&) -> torch::Tensor { throw std::runtime_error("on purpose"); });
    EXPECT_ANY_THROW(both.ours->head(both.ours->block(2)->forward(x, 1)).sum().backward());
    for (const auto& parameter : both.ours->parameters()) ASSERT_FALSE(parameter.grad().defined());
    // Where autograd's own thread ran the backward, the next use cleans up.
    if (!rank.device().is_cpu()) unit(*both.ours).reset();
    ASSERT_TRUE(group::is_freed(both.ours->head->weight));
    both.train(stack_loss, 2, 20);
    unit(*both.ours).reset();
    both.train(stack_loss, 2, 30);
  });
}

TEST(FullyShardPrograms, CastAfterwards) {
  on_ranks([](Rank& rank) {
    Stack ours;
    shard_stack(ours, sharded_on(rank));
    Stack reference;
    ours->to(torch::kDouble);
    reference->to(torch::kDouble);
    auto both = pair(rank, ours, reference);
    ASSERT_EQ(ours->head->weight.dtype(), torch::kFloat);
    both.train(stack_loss);
    ASSERT_EQ(ours->head->weight.dtype(), torch::kDouble);
  });
}

TEST(FullyShardPrograms, Prefetching) {
  on_ranks([](Rank& rank) {
    auto both = stacks(rank, sharded_on(rank).reshard_after_forward(true));
    std::vector<Unit> units;
    for (size_t i = 0; i < 3; ++i) units.push_back(unit(*both.ours->block(i)));
    for (size_t i = 0; i < 3; ++i) {
      if (i < 2) units[i].set_forward_prefetch({units[i + 1]});
      if (i > 0) units[i].set_backward_prefetch({units[i - 1]});
    }
    both.train(stack_loss, 2);
    auto pending = units[1].unshard(/*async=*/true);
    pending.wait();
    pending.wait();
    ASSERT_FALSE(group::is_freed(both.ours->block(1)->up->weight));
    ASSERT_TRUE(group::is_freed(both.ours->block(0)->up->weight));
    units[1].reshard();
    ASSERT_TRUE(group::is_freed(both.ours->block(1)->up->weight));
    both.train(stack_loss, 2, 10);
  });
}

TEST(FullyShardPrograms, Checkpoints) {
  on_ranks([](Rank& rank) {
    auto both = stacks(rank, sharded_on(rank));
    both.train([](Stack& model, int step, int r) {
      auto x = model->embedding(tokens(step, r));
      for (size_t i = 0; i < 3; ++i) {
        x = checkpoint([&model, i](const torch::Tensor& input) { return model->block(i)->forward(input, 0.5); }, x);
      }
      return model->head(x).pow(2).mean();
    });
  });
}

} // namespace shardwise::test
