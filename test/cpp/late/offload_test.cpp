// Shards and gradients in the host's memory, and full copies on the late device.
#include "comm/collectives/buffers.h"
#include "comm/streams/side_stream.h"
#include "ranks/hybrid_models.h"
#include "steps.h"

namespace shardwise::test {
namespace {

CpuOffload pinned(bool pin) {
  return CpuOffload().pin_memory(pin);
}

/// Ways to shard on four ranks.
std::vector<FullyShardOptions> ways(Rank& rank, bool pin) {
  const auto options = sharded_on(rank).cpu_offload(pinned(pin));
  auto flat = options;
  auto halves = options;
  return {
      options, flat.layout(ShardLayout::flat),
      halves.mixed_precision(MixedPrecision().param_dtype(at::kBFloat16).reduce_dtype(at::kBFloat16)),
      hybrid_on(rank, {2, 2}).cpu_offload(pinned(pin))};
}

/// The gradient that the optimizer sees.
torch::Tensor gradient_of(const Stack& model, const std::string& name) {
  return model->named_parameters()[name].grad();
}

} // namespace

TEST(LateOffload, TheHostWaitsOnceForTheGradientsOfABackward) {
  run_ranks(4, [](Rank& rank) {
    for (const auto& options : ways(rank, true)) {
      Stack model;
      shard_stack(model, options);
      EXPECT_EQ(waits_of_training(rank, model), 1);
    }
    Stack model;
    replicate(model, ReplicateOptions().mesh(rank.mesh()).cpu_offload(pinned(true)));
    EXPECT_EQ(waits_of_training(rank, model), 1);
  });
}

TEST(LateOffload, WithoutPinningItWaitsOnceForEachUnit) {
  run_ranks(4, [](Rank& rank) {
    for (const auto& options : ways(rank, false)) {
      Stack model;
      shard_stack(model, options);
      EXPECT_EQ(waits_of_training(rank, model), 4);
    }
  });
}

TEST(LateOffload, GradientsThatAreKept) {
  // Two backwards for each step of the optimizer, the second of which adds to what the first left. A gradient that the
  // program holds stays as it is.
  run_ranks(2, [](Rank& rank) {
    for (const bool pin : {true, false}) {
      Stack ours, reference;
      shard_stack(ours, sharded_on(rank).cpu_offload(pinned(pin)));
      Pair<Stack> both{rank, ours, reference};
      std::vector<std::pair<torch::Tensor, torch::Tensor>> held;
      for (int step = 0; step < 4; ++step) {
        both.backward(stack_loss, 2 * step);
        both.check("the first backward");
        both.backward(stack_loss, 2 * step + 1);
        both.check("the second backward");
        const auto gradient = gradient_of(ours, "head.weight");
        EXPECT_TRUE(gradient.is_cpu());
        EXPECT_EQ(gradient.is_pinned(), pin);
        held.emplace_back(gradient, gradient.clone());
        both.optimize();
      }
      for (const auto& [gradient, values] : held) expect_same(gradient, values, "a gradient that is held");
    }
  });
}

TEST(LateOffload, AHookSeesTheSumBeforeItIsCopied) {
  run_ranks(4, [](Rank& rank) {
    for (const bool pin : {true, false}) {
      Stack hooked, reference;
      auto root = shard_stack(hooked, hybrid_on(rank, {2, 2}).cpu_offload(pinned(pin)));
      shard_stack(reference, hybrid_on(rank, {2, 2}).cpu_offload(pinned(pin)));
      root.set_all_reduce_hook([](at::Tensor& sum) { sum.mul_(3); });
      for (int step = 0; step < 3; ++step) {
        for (auto* model : {&hooked, &reference}) {
          (*model)->zero_grad();
          stack_loss(*model, step, rank.rank()).backward();
        }
        for (const auto& [name, factor] : {std::pair("head.weight", 3), {"blocks.1.up.weight", 1}}) {
          expect_same(gradient_of(hooked, name), factor * gradient_of(reference, name), name, 1e-6);
        }
      }
    }
  });
}

TEST(LateOffload, BackwardsThatTheProgramEnds) {
  run_ranks(4, [](Rank& rank) {
    Stack ours, reference;
    auto root = shard_stack(ours, hybrid_on(rank, {2, 2}).cpu_offload(pinned(true)));
    Pair<Stack> both{rank, ours, reference};
    both.shards = 2;
    for (int step = 0; step < 3; ++step) {
      // Partial sums stay on the device, and go to the host with the sum that has them all.
      root.set_requires_all_reduce(false);
      both.backward(stack_loss, 3 * step);
      root.set_requires_all_reduce(true);
      root.set_manual_backward_finalization(true);
      both.backward(stack_loss, 3 * step + 1);
      both.backward(stack_loss, 3 * step + 2);
      root.finalize_backward();
      root.set_manual_backward_finalization(false);
      both.check("after three backwards");
      both.optimize();
    }
  });
}

// A program may leave the first device current where it trains on another one.
TEST(LateOffload, TheHostWaitsWithTheDeviceOfTheCopiesCurrent) {
  const auto there = at::ones({4}, late_device(1));
  const auto on_host = at::zeros({4}).pin_memory(late_device(1).type());
  comm::Buffers buffers;
  auto use = buffers.note(there);
  comm::HostCopies copies;
  copies.begin(there, use, /*waits=*/false, [&] { on_host.copy_(there, /*non_blocking=*/true); });
  copies.wait();
  expect_no_fault();
  EXPECT_TRUE(at::equal(on_host, at::ones({4})));
}

// Of what was captured nothing has run that the host could wait for.
TEST(LateOffload, AShardMayBeWrittenAfterACapture) {
  run_ranks(2, [](Rank& rank) {
    const torch::NoGradGuard no_grad;
    Stack model;
    shard_stack(model, sharded_on(rank).cpu_offload(pinned(true)));
    const auto batch = tokens(0, 0);
    for (int step = 0; step < 3; ++step) call(model, batch);
    late::Device::of(rank.rank()).synchronize_all();
    {
      const late::Capturing capturing(rank.rank());
      call(model, batch);
    }
    late::Device::of(rank.rank()).synchronize_all();
    for (auto& parameter : model->parameters()) parameter.mul_(2);
  });
}

TEST(LateOffload, AShardMayBeWrittenRightAfterAForward) {
  run_ranks(2, [](Rank& rank) {
    for (const bool loads : {false, true}) {
      Stack ours, reference;
      shard_stack(ours, sharded_on(rank).cpu_offload(pinned(true)));
      const auto dict = full_state_dict(ours, FullStateDictOptions().cpu_offload(true));
      const torch::NoGradGuard no_grad;
      for (int step = 0; step < 4; ++step) {
        const auto loss = stack_loss(ours, step, 0);
        if (loads) {
          load_full_state_dict(ours, dict, LoadStateDictOptions().broadcast_from_rank0(false));
        } else {
          const c10::DeviceGuard another(late_device(1 - rank.rank()));
          for (auto& parameter : ours->parameters()) parameter.mul_(1.25);
        }
        assert_close(loss, stack_loss(reference, step, 0), "step");
        for (auto& parameter : reference->parameters()) parameter.mul_(loads ? 1 : 1.25);
      }
    }
  });
}

} // namespace shardwise::test
