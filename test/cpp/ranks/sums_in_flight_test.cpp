// How many sums are under way at a time, and full parameters that keep their memory.
#include "ranks/held_sums.h"
#include "ranks/hybrid_models.h"

#include "group/leaf_storage.h"

#include <set>

namespace shardwise::test::sums_in_flight {
namespace {

Unit shard(Stack& model, const FullyShardOptions& options, HeldSums& sums) {
  const auto sum = [&](torch::Tensor& output, torch::Tensor& input, c10d::ProcessGroup& group) {
    return sums.start(output, input, group);
  };
  for (auto& block : *model->blocks) fully_shard(*block, options).set_custom_reduce_scatter(sum);
  return fully_shard(model, options).set_custom_reduce_scatter(sum);
}

/// `at_the_end` is called when all blocks have their gradients.
torch::Tensor loss_of(Stack& model, int step, int rank, const std::function<void()>& at_the_end) {
  auto x = model->embedding->forward(tokens(step, rank));
  x.register_hook([at_the_end](const torch::Tensor& /*gradient*/) { at_the_end(); });
  for (size_t i = 0; i < model->blocks->size(); ++i) x = model->block(i)->forward(x, 0.5);
  return model->head->forward(x).pow(2).mean();
}

} // namespace

TEST(SumsInFlight, AsManyAsAreAllowed) {
  constexpr size_t kAll = 100;
  for (const size_t most : {1, 3, 9}) {
    run_ranks(2, [&](Rank& rank) {
      Stack ours(5, 4), reference(5, 4);
      HeldSums sums(kAll);
      auto root = shard(ours, sharded_on(rank), sums);
      // The most that any unit says.
      unit(*ours->block(1)).set_reduce_scatter_max_input_buffers(static_cast<int64_t>(most));
      auto both = pair(rank, ours, reference);
      for (int step = 0; step < 4; ++step) {
        if (step == 3) root.set_reduce_scatter_max_input_buffers(1);
        sums.set_most_held(kAll);
        loss_of(ours, step, rank.rank(), [&] { sums.release_all(); }).backward();
        reference_backward(rank, [&](int r) { return stack_loss(reference, step, r); });
        ASSERT_EQ(sums.held_at_the_end, step == 3 ? 1 : std::min<size_t>(most, 4)) << "there are four blocks";
        both.finish(step);
      }
    });
  }
}

TEST(SumsInFlight, BesideSecondSumsAndTheNextForward) {
  on_grids<Stack>({{2, 2}, {2, 1}}, shallow_stack, [](Pair<Stack>& both, FullyShardOptions options) {
    auto root = shard_stack(both.ours, options);
    root.set_reduce_scatter_max_input_buffers(3).set_manual_backward_finalization(true);
    for (int step = 0; step < 8; step += 2) {
      both.backward(stack_loss, step);
      both.backward(stack_loss, step + 1);
      root.finalize_backward();
      both.finish(step);
    }
  });
}

TEST(SumsInFlight, MemoryThatIsKept) {
  for (const auto layout : {ShardLayout::rows, ShardLayout::flat}) {
    for (const bool low : {false, true}) {
      run_ranks(2, [&](Rank& rank) {
        auto options = sharded_on(rank).layout(layout);
        if (low) options.mixed_precision(MixedPrecision().param_dtype(torch::kBFloat16));
        auto both = stacks(rank, options);
        auto root = unit(*both.ours).set_keep_unsharded_storage(true);
        std::vector<const void*> seen;
        const auto addresses = [&] {
          std::vector<const void*> all;
          for (const auto& block : *both.ours->blocks) {
            unit(*block).unshard();
            all.push_back(block->as<Block>()->up->weight.const_data_ptr());
            unit(*block).reshard();
            EXPECT_TRUE(group::is_freed(block->as<Block>()->up->weight)) << "freed parameters cannot be read";
          }
          return all;
        };
        const auto first = addresses();
        for (int step = 0; step < 3; ++step) {
          both.backward(stack_loss, step);
          if (!low && layout == ShardLayout::rows) both.finish(step);
          ASSERT_EQ(addresses(), first);
        }
        std::set<const void*> apart(first.begin(), first.end());
        ASSERT_EQ(apart.size(), first.size()) << "each unit has memory of its own";
        // From the next time that they are freed, units share memory again: on a CPU with all of the process.
        root.set_keep_unsharded_storage(false);
        addresses();
        const auto shared = addresses();
        if (rank.device().is_cpu()) return;
        ASSERT_LT(std::set<const void*>(shared.begin(), shared.end()).size(), first.size());
      });
    }
  }
}

} // namespace shardwise::test::sums_in_flight
