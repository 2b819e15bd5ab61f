// The engine on the late device, where only a device can tell: which stream waits for which, and which device is meant.
#include "comm/collectives/buffers.h"
#include "late_device/group.h"
#include "late_test.h"
#include "ranks/hybrid_models.h"
#include "support/expect.h"
#include "support/port.h"
#include "support/variables.h"

namespace shardwise::test {
namespace {

std::vector<FullyShardOptions> ways_to_gather(Rank& rank) {
  const auto options = sharded_on(rank);
  auto flat = options;
  auto offloaded = options;
  return {options, flat.layout(ShardLayout::flat), offloaded.cpu_offload(CpuOffload())};
}

/// What a gather writes to is free for others only once it is done.
void use_what_is_free(Rank& rank) {
  std::vector<torch::Tensor> next;
  for (int64_t size = 16; size <= 4096; size *= 2) next.push_back(torch::full({size}, 3.0, rank.device()));
  for (const auto& tensor : next) EXPECT_TRUE(tensor.eq(3).all().item<bool>());
}

/// Fails between two layers.
struct Stops : torch::nn::Module {
  torch::Tensor forward(const torch::Tensor& x) {
    if (now) throw std::runtime_error("it stops here");
    return x;
  }
  bool now = false;
};

} // namespace

TEST(LateEngine, ADeviceWithoutAnIndexIsThatOfTheRank) {
  const Port port;
  const Variables changed(of_no_rank(
      {{"RANK", "0"},
       {"WORLD_SIZE", "1"},
       {"LOCAL_RANK", "3"},
       {"MASTER_ADDR", "127.0.0.1"},
       {"MASTER_PORT", std::to_string(port.number())}}));
  const auto mesh = Mesh::from_env(MeshOptions().device(at::kPrivateUse1));
  EXPECT_EQ(mesh.device(), late_device(3));
  EXPECT_EQ(mesh.group("world")->getBoundDeviceId(), late_device(3));
  const auto given = Mesh::from_process_groups({"given"}, {mesh.group("world")}, at::kPrivateUse1);
  EXPECT_EQ(given.device(), late_device(3));
}

TEST(LateEngine, ACheckpointDrawsAgainOnTheDeviceOfItsInputs) {
  // The current device is another one, as where a program never sets it.
  const c10::DeviceGuard guard(late_device(0));
  const auto x = torch::ones({200}, late_device(3)).requires_grad_();
  const auto y = activation_checkpoint([](const torch::Tensor& in) { return torch::dropout(in, 0.5, true) * 2; }, x);
  y.sum().backward();
  expect_same(x.grad(), y.detach().cpu(), "the same elements were dropped");
  EXPECT_GT((y == 0).sum().item<int64_t>(), 0);
}

TEST(LateEngine, APinnedBatchMayBeUsedAgainRightAfterTheForward) {
  run_ranks(2, [](Rank& rank) {
    auto ours = mlp({5, 4, 3});
    auto reference = mlp({5, 4, 3});
    fully_shard(ours, sharded_on(rank));
    auto batch = torch::empty({6, 5}, at::kCPU).pin_memory();
    for (int step = 0; step < 3; ++step) {
      batch.fill_(step + 1);
      const auto expected = reference->forward(batch.to(rank.device()));
      const auto out = call(ours, batch);
      batch.fill_(-1);
      assert_close(out.detach(), expected.detach(), "step");
    }
  });
}

TEST(LateEngine, RecordStreamOfAFullParameterIsRefused) {
  run_ranks(1, [](Rank& rank) {
    torch::nn::Linear model(8, 8);
    auto unit = fully_shard(model, sharded_on(rank));
    unit.unshard();
    const auto side = new_stream();
    for (const auto& tensor : {model->weight, model->weight.detach()}) {
      expect_error<Error>(
          [&] { tensor.record_stream(side); }, {"full copy of 'weight'", "make the current stream wait"});
    }
  });
}

TEST(LateEngine, AModelThatGoesWhileTheNextUnitIsGatheredAhead) {
  run_ranks(2, [](Rank& rank) {
    for (const auto& options : ways_to_gather(rank)) {
      {
        const auto stops = std::make_shared<Stops>();
        torch::nn::Sequential model(torch::nn::Linear(8, 96), stops, torch::nn::Linear(96, 8));
        for (const auto& layer : {model->ptr(0), model->ptr(2)}) fully_shard(layer, options);
        fully_shard(model, options);
        const auto x = torch::ones({4, 8}, rank.device());
        // From the second step on the order is known, and the first layer's gather brings the last one's with it.
        for (int step = 0; step < 3; ++step) call(model, x).sum().backward();
        stops->now = true;
        const auto unshards = unit(*model->ptr(2)).counters().unshards;
        EXPECT_THROW(call(model, x), std::runtime_error);
        EXPECT_EQ(unit(*model->ptr(2)).counters().unshards, unshards + 1) << "it was not gathered ahead";
      }
      use_what_is_free(rank);
    }
  });
}

TEST(LateEngine, AnOptimizerOnAStreamOfItsOwn) {
  run_ranks(2, [](Rank& rank) {
    const auto index = rank.rank();
    const auto side = new_stream(index);
    Stack ours;
    auto root = shard_stack(ours, sharded_on(rank));
    Pair<Stack> both{rank, ours, Stack()};
    both.make_optimizers();
    for (int step = 0; step < 4; ++step) {
      both.backward(stack_loss, step);
      both.theirs->step();
      wait_for(side, late::current_stream(index));
      {
        const c10::StreamGuard guard(side);
        both.mine->step();
      }
      const auto stepped = std::make_shared<c10::Event>(at::kPrivateUse1);
      stepped->record(side);
      root.set_post_optim_event(stepped);
      const auto loss = stack_loss(ours, 10 + step, index).detach();
      assert_close(loss, stack_loss(both.reference, 10 + step, index).detach(), "after a step");
      both.mine->zero_grad();
      both.theirs->zero_grad();
    }
    // A gather ahead is under way.
    root.reset();
  });
}

namespace {

/// Each use of a model after a step of an optimizer on a stream of its own, of which only the event tells.
template <typename Use>
void use_after_a_step_elsewhere(const Use& use) {
  run_ranks(2, [&](Rank& rank) {
    const auto index = rank.rank();
    const auto side = new_stream(index);
    Stack ours, reference;
    auto root = shard_stack(ours, sharded_on(rank));
    root.set_prefetch(false);
    for (int step = 0; step < 4; ++step) {
      root.reshard();
      for (auto& block : *ours->blocks) unit(*block).reshard();
      // What was gathered before has read the shards.
      wait_for(side, late::current_stream(index));
      {
        const torch::NoGradGuard no_grad;
        const c10::StreamGuard guard(side);
        for (auto& parameter : ours->parameters()) parameter.mul_(1.25);
      }
      {
        const torch::NoGradGuard no_grad;
        for (auto& parameter : reference->parameters()) parameter.mul_(1.25);
      }
      const auto stepped = std::make_shared<c10::Event>(at::kPrivateUse1);
      stepped->record(side);
      root.set_post_optim_event(stepped);
      use(root, ours, reference);
    }
  });
}

} // namespace

TEST(LateEngine, UnshardByHandWaitsForTheOptimizersEvent) {
  for (const bool async : {true, false}) {
    use_after_a_step_elsewhere([&](Unit& root, Stack& ours, Stack& reference) {
      root.unshard(async).wait();
      expect_same(ours->head->weight, reference->head->weight.detach().cpu(), "the full copy");
    });
  }
}

TEST(LateEngine, StateDictsWaitForTheOptimizersEvent) {
  use_after_a_step_elsewhere([](Unit&, Stack& ours, Stack& reference) {
    const auto dict = full_state_dict(ours);
    expect_same(dict["head.weight"], reference->head->weight.detach().cpu(), "of the root");
    expect_same(dict["blocks.1.up.weight"], reference->block(1)->up->weight.detach().cpu(), "of a block");
  });
}

TEST(LateEngine, LoadedValuesWaitForTheOptimizersEvent) {
  use_after_a_step_elsewhere([](Unit&, Stack& ours, Stack& reference) {
    StateDict dict;
    for (const auto& entry : reference->named_parameters()) dict.insert(entry.key(), entry.value().detach());
    load_full_state_dict(ours, dict);
    load_full_state_dict(ours, dict, LoadStateDictOptions().broadcast_from_rank0(false));
  });
}

namespace {

/// A vector of the pool, once a long computation on that stream has written to it.
at::Tensor fill_on(const c10::Stream& stream, comm::Buffers& pool) {
  const c10::StreamGuard guard(stream);
  Counters counters;
  auto memory = pool.take(1000, at::TensorOptions(late_device()).dtype(at::kFloat), counters);
  memory.fill_(1);
  return memory;
}

void give_on(const c10::Stream& stream, const at::Tensor& memory, comm::Buffers& pool) {
  const c10::StreamGuard guard(stream);
  pool.give(memory);
}

} // namespace

TEST(LateEngine, MemoryThatGoesFromStreamToStreamIsWaitedFor) {
  const std::vector<c10::Stream> streams{new_stream(), new_stream()};
  comm::Buffers pool;
  const void* first = nullptr;
  for (int turn = 0; turn < 6; ++turn) {
    const auto& stream = streams[turn % 2];
    const auto memory = fill_on(stream, pool);
    if (first == nullptr) first = memory.storage().data();
    EXPECT_EQ(memory.storage().data(), first);
    give_on(stream, memory, pool);
  }
  late::Device::of(0).synchronize_all();
  expect_no_fault();
}

TEST(LateEngine, MemoryGoesBackToItsAllocatorAfterItsLastUse) {
  const auto made = new_stream();
  const auto used = new_stream();
  for (int turn = 0; turn < 6; ++turn) {
    comm::Buffers pool;
    give_on(made, fill_on(made, pool), pool);
    give_on(used, fill_on(used, pool), pool);
    pool.free_idle();
    const c10::StreamGuard guard(made);
    at::full({1000}, 2, at::TensorOptions(late_device()).dtype(at::kFloat));
  }
  late::Device::of(0).synchronize_all();
  expect_no_fault();
}

TEST(LateEngine, APoolOfSeveralDevices) {
  comm::Buffers pool;
  Counters counters;
  for (int turn = 0; turn < 4; ++turn) {
    std::vector<at::Tensor> taken;
    for (const auto device : {late_device(0), late_device(1), at::Device(at::kCPU)}) {
      taken.push_back(pool.take(1000, at::TensorOptions(device).dtype(at::kFloat), counters));
      taken.back().fill_(1);
    }
    for (const int next : {1, 0, 2}) pool.give(taken[next]);
  }
  // The memory of the CPU comes from the process's arena.
  EXPECT_EQ(counters.allocations, 2);
  for (const int index : {0, 1}) late::Device::of(index).synchronize_all();
  expect_no_fault();
}

TEST(LateEngine, AMeshThatEndsWithAnErrorWaitsForNobody) {
  run_ranks(2, [](Rank& rank) {
    const auto stumble = [&] {
      const Mesh mesh({{"world", rank.world_size()}}, rank.mesh_options("own").timeout(std::chrono::seconds(20)));
      if (rank.rank() == 1) return;
      // The other rank never comes.
      std::vector<at::Tensor> sum{torch::ones({4}, rank.device())};
      mesh.group("world")->allreduce(sum);
      throw std::runtime_error("what the program stumbled over");
    };
    const auto begin = std::chrono::steady_clock::now();
    if (rank.rank() == 1) return stumble();
    EXPECT_THROW(stumble(), std::runtime_error);
    EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(10));
  });
  late::take_faults();
}

// Else the first collective of each would, in the middle of a step and within its time limit.
TEST(LateEngine, GroupsAreConnectedWhenTheyAreMade) {
  run_ranks(4, [](Rank& rank) {
    const auto connecting = [&] { return late::Group::memory_use(rank.rank()).connecting; };
    const auto before = connecting();
    Stack model;
    shard_stack(model, hybrid_on(rank, {2, 2}));
    for (int step = 0; step < 2; ++step) stack_loss(model, step, rank.rank()).backward();
    EXPECT_EQ(connecting(), before);
  });
}

} // namespace shardwise::test
