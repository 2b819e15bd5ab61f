// fully_shard on a mesh of two axes: everything that has to do with the second sum.
#include "ranks/hybrid_models.h"

namespace shardwise::test {
namespace {

Unit shard(Pair<Stack>& both, const FullyShardOptions& options) {
  const auto root = shard_stack(both.ours, options);
  both.mine = torch::optim::AdamW(both.ours->parameters(), torch::optim::AdamWOptions(0.02));
  return root;
}

/// Whatever the shards look like.
void assert_whole(const Pair<Stack>& both) {
  const auto state = full_state_dict(*both.ours);
  for (const auto& entry : both.reference->named_parameters()) {
    assert_close(state[entry.key()], entry.value().detach(), entry.key());
  }
}

} // namespace

TEST(FullyShardHybrid, ParityOnEveryGrid) {
  on_grids<Stack>(kGrids, shallow_stack, [](Pair<Stack>& both, FullyShardOptions options) {
    const auto root = shard(both, options);
    both.train(stack_loss);
    const auto counters = root.counters();
    ASSERT_EQ(counters.all_reduces > 0, both.rank.world_size() > both.shards);
    ASSERT_EQ(counters.reduce_scatters > 0, both.shards > 1);
  });
}

TEST(FullyShardHybrid, FlatLayout) {
  on_grids<Stack>({{2, 2}, {2, 3}, {2, 1}}, shallow_stack, [](Pair<Stack>& both, FullyShardOptions options) {
    shard(both, options.layout(ShardLayout::flat));
    for (int step = 0; step < 4; ++step) {
      both.backward(stack_loss, step);
      both.optimize();
      assert_whole(both);
    }
  });
}

TEST(FullyShardHybrid, PartialSumsWaitForTheAllReduce) {
  // R12: kept apart from .grad, through failures and changes of what is trained.
  on_grids<Stack>({{2, 2}, {2, 1}, {1, 2}}, shallow_stack, [](Pair<Stack>& both, FullyShardOptions options) {
    auto root = shard(both, options);
    for (int step = 0; step < 12; step += 3) {
      root.set_requires_all_reduce(false);
      both.backward(stack_loss, step);
      for (const auto& parameter : both.ours->parameters()) ASSERT_FALSE(parameter.grad().defined());
      both.backward(stack_loss, step + 1);
      // Frozen and back: what it brought so far is not lost.
      for (auto* model : {&both.ours, &both.reference}) {
        for (auto& parameter : (*model)->block(0)->parameters()) parameter.set_requires_grad(false);
      }
      root.set_requires_all_reduce(true);
      const bool failed = step == 6;
      if (failed) {
        const auto bad = [&](Stack& model, int number, int r) {
          auto loss = stack_loss(model, number, r);
          auto probe = loss * 1;
          probe.register_hook([](const torch::Tensor&) -> torch::Tensor { throw std::runtime_error("on purpose"); });
          return probe;
        };
        ASSERT_THROW(bad(both.ours, 99, both.rank.rank()).backward(), std::runtime_error);
      }
      for (auto* model : {&both.ours, &both.reference}) {
        for (auto& parameter : (*model)->block(0)->parameters()) parameter.set_requires_grad(true);
      }
      both.backward(stack_loss, step + 2);
      both.check("step " + std::to_string(step));
      both.optimize();
    }
  });
}

TEST(FullyShardHybrid, AParameterThatIsFrozenBeforeTheAllReduce) {
  on_grids<Stack>({{2, 2}, {2, 1}, {1, 2}}, shallow_stack, [](Pair<Stack>& both, FullyShardOptions options) {
    auto root = shard(both, options);
    const auto train_block_0 = [&](bool value) {
      for (auto* model : {&both.ours, &both.reference}) {
        for (auto& parameter : (*model)->block(0)->parameters()) parameter.set_requires_grad(value);
      }
    };
    for (int step = 0; step < 6; step += 2) {
      root.set_requires_all_reduce(false);
      both.backward(stack_loss, step);
      train_block_0(false);
      root.set_requires_all_reduce(true);
      both.backward(stack_loss, step + 1);
      both.check("step " + std::to_string(step));
      both.optimize();
      train_block_0(true);
    }
  });
}

TEST(FullyShardHybrid, UnusedOnSomeRanks) {
  // T03: a count is summed along both axes; a partial sum brings its own.
  on_grids<Branches>(
      {{2, 2}, {2, 1}}, [] { return Branches(); },
      [](Pair<Branches>& both, FullyShardOptions options) {
        auto root = fully_shard(both.ours, options);
        both.mine = torch::optim::AdamW(both.ours->parameters(), torch::optim::AdamWOptions(0.02));
        const auto loss = [&](const std::vector<std::string>& some, const std::vector<std::string>& others, int only) {
          return [=](Branches& model, int step, int r) {
            return model->forward(batch(step, r, 3), r == only ? some : others).pow(2).sum();
          };
        };
        const int last = both.rank.world_size() - 1;
        for (int step = 0; step < 8; step += 2) {
          root.set_requires_all_reduce(false);
          both.backward(loss({"left"}, {}, last), step);
          root.set_requires_all_reduce(true);
          both.backward(loss({}, {}, -1), step + 1);
          ASSERT_FALSE(both.ours->right->parameters()[0].grad().defined());
          both.check("step " + std::to_string(step));
          both.optimize();
        }
        both.train(loss({"right"}, {"left"}, 1), 2, 50);
      });
}

TEST(FullyShardHybrid, DivideFactorOfOneUnit) {
  // R03: the same on every mesh, for a part of a model.
  for (const bool after : {false, true}) {
    on_grids<Stack>({{1, 2}, {2, 1}, {2, 2}}, shallow_stack, [after](Pair<Stack>& both, FullyShardOptions options) {
      shard(both, options);
      auto block = unit(*both.ours->block(1));
      block.set_gradient_divide_factor(3);
      block.set_force_sum_reduction(after);
      for (int step = 0; step < 3; ++step) {
        both.backward(stack_loss, step);
        for (auto& parameter : both.reference->block(1)->parameters()) {
          parameter.mutable_grad().mul_(both.rank.world_size() / 3.0);
        }
        both.check("step " + std::to_string(step));
        both.optimize();
      }
    });
  }
  run_ranks(2, [](Rank& rank) {
    torch::nn::Linear model(2, 1);
    auto unit = replicate(model, on(rank));
    for (const double wrong : {0.0, -1.0, std::nan("")}) {
      expect_error<ValueError>([&] { unit.set_gradient_divide_factor(wrong); }, {"divide factor", "above 0"});
    }
    unit.set_gradient_divide_factor(1);
    call(model, torch::full({1, 2}, 1.0 + rank.rank())).sum().backward();
    ASSERT_TRUE(torch::equal(model->weight.grad(), torch::full({1, 2}, 3.0)));
  });
}

TEST(FullyShardHybrid, BackwardsThatTheProgramEnds) {
  on_grids<Stack>({{2, 2}}, shallow_stack, [](Pair<Stack>& both, FullyShardOptions options) {
    auto root = shard(both, options).set_manual_backward_finalization(true);
    for (int step = 0; step < 9; step += 3) {
      both.backward(stack_loss, step);
      both.backward(stack_loss, step + 1);
      both.backward(stack_loss, step + 2);
      root.finalize_backward();
      both.check("step " + std::to_string(step));
      both.optimize();
    }
  });
}

TEST(FullyShardHybrid, BesideReplicateInOneTree) {
  // The first axis carries sums of both kinds of units.
  on_grids<Stack>({{2, 2}}, shallow_stack, [](Pair<Stack>& both, FullyShardOptions options) {
    replicate(both.ours->block(0), ReplicateOptions().mesh(both.rank.mesh()));
    fully_shard(both.ours->block(1), options);
    replicate(both.ours->embedding, ReplicateOptions().mesh(both.rank.mesh()));
    fully_shard(both.ours, options);
    both.mine = torch::optim::AdamW(both.ours->parameters(), torch::optim::AdamWOptions(0.02));
    for (const auto& entry : both.ours->named_parameters()) {
      const auto& name = entry.key();
      if (name.starts_with("blocks.0") || name.starts_with("embedding")) both.dims[name] = -1;
    }
    both.train(stack_loss);
  });
}

TEST(FullyShardHybrid, StateDictAndClip) {
  on_grids<Stack>({{2, 2}, {2, 1}, {1, 2}}, shallow_stack, [](Pair<Stack>& both, FullyShardOptions options) {
    shard(both, options);
    for (int step = 0; step < 3; ++step) {
      both.backward(stack_loss, step);
      const auto norm = clip_grad_norm_(*both.ours, 0.1);
      const auto expected = torch::nn::utils::clip_grad_norm_(both.reference->parameters(), 0.1);
      ASSERT_NEAR(norm, expected, 1e-5 * expected);
      both.check("clipped");
      both.optimize();
    }
    assert_whole(both);
    const auto state = full_state_dict(*both.ours);
    const auto at_root = full_state_dict(*both.ours, FullStateDictOptions().rank0_only(true));
    ASSERT_EQ(at_root.size(), both.rank.rank() == 0 ? state.size() : 0);
    // Back to what it was, from the first rank alone.
    StateDict other;
    if (both.rank.rank() == 0) {
      for (const auto& item : state) other.insert(item.key(), item.value() * 2);
    }
    load_full_state_dict(*both.ours, other);
    for (const auto& entry : both.reference->named_parameters()) {
      const torch::NoGradGuard guard;
      entry.value().mul_(2);
    }
    both.check("loaded");
    both.train(stack_loss, 2, 20);
  });
}

TEST(FullyShardHybrid, RanksThatDifferAlongEitherAxis) {
  // Everyone hears of it, also ranks that differ from none of their peers along an axis.
  for (const int odd : {1, 2, 3}) {
    run_ranks(4, [&](Rank& rank) {
      torch::nn::Sequential model(torch::nn::Linear(4, rank.rank() == odd ? 5 : 4));
      expect_error<Error>(
          [&] {
            fully_shard(model, hybrid_on(rank, {2, 2}));
          },
          {"the ranks wrap different modules", "0.weight"});
      rank.close();
    });
    run_ranks(4, [&](Rank& rank) {
      auto model = shallow_stack();
      auto root = shard_stack(model, hybrid_on(rank, {2, 2}));
      for (int step = 0; step < 3; ++step) stack_loss(model, step, rank.rank()).backward();
      if (rank.rank() == odd) root.set_requires_gradient_sync(false);
      expect_error<Error>(
          [&] {
            stack_loss(model, 3, rank.rank()).backward();
            stack_loss(model, 4, rank.rank()).backward();
          },
          {"the ranks do not run the same units in the same order", "a backward that sums"});
      rank.close();
    });
  }
}

} // namespace shardwise::test
