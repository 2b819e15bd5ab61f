// Which units take part in the sums of a backward: on all ranks or on none.
#include "ranks/fully_shard_models.h"

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <chrono>
#include <thread>

namespace shardwise::test {
namespace {

using Work = c10::intrusive_ptr<c10d::Work>;

torch::Tensor without_block_1(Stack& model, int step, int rank) {
  const auto x = model->block(0)->forward(model->embedding(tokens(step, rank)), 0.5);
  return model->head(model->block(2)->forward(x, 0.5)).pow(2).mean();
}

/// A back end with another one's collectives, and without options.
class Plain : public c10d::Backend {
 public:
  explicit Plain(const c10::intrusive_ptr<Backend>& inner)
      : Backend(inner->getRank(), inner->getSize()),
        inner_(inner) {}
  const std::string getBackendName() const override {
    return "plain";
  }
  Work _allgather_base(torch::Tensor& output, torch::Tensor& input, const c10d::AllgatherOptions& options) override {
    return inner_->_allgather_base(output, input, options);
  }
  Work _reduce_scatter_base(
      torch::Tensor& output, torch::Tensor& input, const c10d::ReduceScatterOptions& options) override {
    return inner_->_reduce_scatter_base(output, input, options);
  }
  Work broadcast(std::vector<torch::Tensor>& tensors, const c10d::BroadcastOptions& options) override {
    return inner_->broadcast(tensors, options);
  }

 private:
  c10::intrusive_ptr<Backend> inner_;
};

} // namespace

TEST(FullyShardParticipation, AUnitThatTheLossOfOneRankLeavesOut) {
  // T01: all ranks run it forward; on one of them no gradient comes to it.
  run_ranks(3, [](Rank& rank) {
    const auto loss = [&](Stack& model, int step, int r) {
      const auto x = model->block(0)->forward(model->embedding(tokens(step, r)), 0.5);
      const auto side = model->block(1)->forward(x, 0.5);
      const auto main = model->head(model->block(2)->forward(x, 0.5)).pow(2).mean();
      return r == step % rank.world_size() ? main : main + side.pow(2).mean();
    };
    // In backward it is not gathered: there the ranks would differ.
    stacks(rank, sharded_on(rank).reshard_after_forward(false)).train(loss);
  });
}

TEST(FullyShardParticipation, SumsOnAGroupOfTheCallersOwnWaitForTheEnd) {
  // Beside a group without a time limit none is made, so it carries gathers too. Rank 0 comes late to blocks 2 and 1,
  // and finds the sum of the first done when the second is ready. Rank 1 was there when that sum still waited, and
  // gathers block 0 next.
  run_ranks(2, [](Rank& rank) {
    const auto group = c10::make_intrusive<c10d::ProcessGroup>(
        c10::make_intrusive<c10d::PrefixStore>("plain", rank.store()), rank.rank(), 2);
    group->setBackend(
        at::kCPU, c10d::ProcessGroup::BackendType::MPI,
        c10::make_intrusive<Plain>(rank.mesh().group("world")->getBackend(at::kCPU)));
    const auto mesh = Mesh::from_process_groups({"world"}, {group}, at::kCPU);
    Stack ours;
    const auto options = FullyShardOptions().mesh(mesh);
    for (size_t i = 0; i < 3; ++i) {
      fully_shard(ours->block(i), FullyShardOptions(options).reshard_after_forward(i == 0));
    }
    fully_shard(ours, options);
    Pair<Stack>{rank, ours, Stack()}.train([](Stack& model, int step, int r) {
      auto x = model->embedding(tokens(step, r));
      for (size_t i = 0; i < 3; ++i) {
        x = model->block(i)->forward(x, 0.5);
        x.register_hook([is_late = r == 0 && i > 0](const torch::Tensor&) {
          if (is_late) std::this_thread::sleep_for(std::chrono::milliseconds(50));
        });
      }
      return model->head(x).pow(2).mean();
    });
  });
}

TEST(FullyShardParticipation, ABackwardThatDiesWhileRanksAreApart) {
  // T12: rank 0 comes late, and finds the sum of block 2 done when block 1 is ready: it starts that of block 1 at once.
  // Rank 1 was there when the sum of block 2 still waited for rank 0. Then both die.
  for (const bool sharded : {false, true}) {
    run_ranks(2, [&](Rank& rank) {
      auto both = sharded ? stacks(rank, sharded_on(rank).reshard_after_forward(false)) : stacks_of_copies(rank);
      auto& ours = both.ours;
      both.train(stack_loss, 3);
      auto x = ours->embedding(tokens(3, rank.rank()));
      for (size_t i = 0; i < 3; ++i) {
        x = ours->block(i)->forward(x, 0.5);
        x.register_hook([i, late = rank.rank() == 0](const torch::Tensor&) {
          if (i == 0) throw std::runtime_error("on purpose");
          if (late) std::this_thread::sleep_for(std::chrono::milliseconds(200));
        });
      }
      EXPECT_THROW(ours->head(x).pow(2).mean().backward(), std::runtime_error);
      both.check("after the failure");
      both.train(stack_loss, 3, 4);
    });
  }
}

TEST(FullyShardParticipation, ABackwardThatDiesAfterOtherSumsOnEachRank) {
  // Rank 1 does not use block 1, and so sums it with block 2; rank 0 waits for its gradients. Then both die. A sum of
  // the next backward would meet that one.
  run_ranks(2, [](Rank& rank) {
    auto ours = stacks_of_copies(rank).ours;
    for (int step = 0; step < 2; ++step) stack_loss(ours, step, rank.rank()).backward();
    auto x = ours->block(0)->forward(ours->embedding(tokens(2, rank.rank())), 0.5);
    if (rank.rank() == 0) x = ours->block(1)->forward(x, 0.5);
    x.register_hook([](const torch::Tensor&) -> torch::Tensor { throw std::runtime_error("on purpose"); });
    const auto loss = ours->head(ours->block(2)->forward(x, 0.5)).pow(2).mean();
    expect_error<std::exception>([&] { loss.backward(); }, {"on purpose"});
    expect_error<Error>(
        [&] { stack_loss(ours, 3, rank.rank()).backward(); },
        {c10::str("shardwise: rank ", rank.rank(), ":"), "a backward that failed after the sum of unit 'blocks.2'",
         "after the sum of unit 'blocks.1'"});
    rank.mesh().shutdown();
  });
}

TEST(FullyShardParticipation, ATreeThatIsWrappedPublishesWhatIsUnderWay) {
  // Nobody would do it later, for the tree is no more.
  run_ranks(2, [](Rank& rank) {
    Stack ours(5, 1);
    auto head = fully_shard(ours->head, sharded_on(rank));
    head.set_manual_backward_finalization(true);
    const auto loss = [](Stack& model, int step, int r) { return model->head(batch(step, r, 5)).pow(2).mean(); };
    loss(ours, 0, rank.rank()).backward();
    shard_stack(ours, sharded_on(rank));
    Pair<Stack> both{rank, ours, Stack(5, 1)};
    reference_backward(rank, [&](int r) { return loss(both.reference, 0, r); });
    both.check("after wrapping");
  });
}

TEST(FullyShardParticipation, AUnitThatOnlyAnEarlierBackwardUsed) {
  // T01: block 1 runs in the first forward alone, and there the loss of one rank leaves it out.
  run_ranks(3, [](Rank& rank) {
    // In backward it is not gathered: there the ranks would differ.
    auto both = stacks(rank, sharded_on(rank).reshard_after_forward(false));
    auto root = unit(*both.ours);
    const auto first = [&](Stack& model, int step, int r) {
      const auto side = model->block(1)->forward(model->embedding(tokens(step, r)), 0.5).pow(2).mean();
      const auto main = without_block_1(model, step, r);
      return r == step / 2 % rank.world_size() ? main : main + side;
    };
    for (int step = 0; step < 6; step += 2) {
      rank.step("step " + std::to_string(step));
      root.set_requires_gradient_sync(false);
      both.backward(first, step);
      root.set_requires_gradient_sync(true);
      both.backward(without_block_1, step + 1);
      both.finish(step);
    }
  });
}

TEST(FullyShardParticipation, AParameterThatIsFrozenBeforeItsSum) {
  for (const int world : {1, 3}) {
    for (const bool waits : {false, true}) {
      run_ranks(world, [=](Rank& rank) {
        auto both = stacks(rank, sharded_on(rank));
        auto root = unit(*both.ours);
        const auto train_block_0 = [&](bool value) {
          both.each([&](Stack& model) { set_trained(*model->block(0), value); });
        };
        for (int step = 0; step < 9; step += 3) {
          root.set_requires_gradient_sync(false).set_manual_backward_finalization(waits);
          both.backward(stack_loss, step);
          both.backward(stack_loss, step + 1);
          train_block_0(false);
          root.set_requires_gradient_sync(true);
          both.backward(stack_loss, step + 2);
          if (waits) root.finalize_backward();
          both.check(c10::str("step ", step, ", waits ", waits));
          both.optimize();
          train_block_0(true);
        }
      });
    }
  }
}

} // namespace shardwise::test
