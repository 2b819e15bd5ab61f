// The meta device: what is refused, what memory it takes, what is where.
#include "ranks/state_models.h"
#include "support/expect.h"
#include "support/processes.h"
#include "tensor_memory.h"

namespace shardwise::test {
namespace {

std::vector<std::string> names_and_remedy(const torch::nn::Module& module) {
  std::vector<std::string> parts{"meta device", "shardwise::to_empty(", "load_full_state_dict()"};
  for (const auto& name : module.named_parameters().keys()) parts.push_back("'" + name + "'");
  return parts;
}

} // namespace

TEST(MetaContract, WhatNeedsValuesNamesAllThatHaveNone) {
  run_ranks(2, [](Rank& rank) {
    for (const auto layout : {ShardLayout::rows, ShardLayout::flat}) {
      auto ours = stack_on_meta();
      const auto root = shard_stack(ours, sharded_on(rank).layout(layout));
      const std::vector<std::pair<std::string, std::function<void()>>> calls{
          {"a call", [&] { call(ours, tokens(0, 0)); }},
          {"a direct call", [&] { ours->forward(tokens(0, 0)); }},
          {"a call of an inner module", [&] { ours->block(1)->forward(batch(0, 0, 6), 1); }},
          {"unshard", [&] { unit(*ours->block(0)).unshard(); }},
          {"an asynchronous unshard", [&] { unit(*ours->block(0)).unshard(true).wait(); }},
          {"full_state_dict", [&] { full_state_dict(ours); }},
          {"load_full_state_dict", [&] { load_full_state_dict(ours, full_state_dict(Stack())); }},
          {"clip_grad_norm_ of a module", [&] { clip_grad_norm_(ours, 1); }},
          {"clip_grad_norm_ of parameters", [&] { clip_grad_norm_(ours->parameters(), 1); }},
      };
      for (const auto& [what, fn] : calls) {
        SCOPED_TRACE(what);
        rank.step(what);
        expect_error<Error>(fn, names_and_remedy(*ours));
      }
      // None of them left anything behind.
      to_empty(ours);
      load_full_state_dict(ours, full_state_dict(Stack()));
      for (int step = 0; step < 3; ++step) stack_loss(ours, step, rank.rank()).backward();
    }
  });
}

TEST(MetaContract, OfReplicatedUnitsToo) {
  run_ranks(2, [](Rank& rank) {
    auto ours = stack_on_meta();
    auto root = replicate(ours, on(rank));
    const auto parts = names_and_remedy(*ours);
    expect_error<Error>([&] { call(ours, tokens(0, 0)); }, parts);
    expect_error<Error>([&] { root.unshard(); }, parts);
    expect_error<Error>([&] { full_state_dict(ours); }, parts);
    expect_error<Error>([&] { clip_grad_norm_(ours, 1); }, parts);
    // Its forward is not seen, and gives nothing; backward is.
    auto loss = ours->block(0)->up->forward(batch(0, 0, 6).to(torch::kMeta)).sum();
    expect_error<Error>([&] { loss.backward(); }, parts);
    Pair<Stack> both{rank, ours, Stack()};
    both.make_optimizers();
    to_empty(ours);
    load_full_state_dict(ours, full_state_dict(Stack()));
    for (int step = 0; step < 3; ++step) {
      both.backward(stack_loss, step);
      assert_same(*both.ours, *both.reference, "step");
      both.optimize();
    }
  });
}

TEST(MetaContract, NamesOfBuffersAndOfPlainModules) {
  run_ranks(2, [](Rank& rank) {
    const auto make = [] { return torch::nn::Sequential(torch::nn::BatchNorm1d(3), torch::nn::Linear(3, 2)); };
    auto plain = on_meta(make);
    expect_error<Error>([&] { full_state_dict(plain); }, {"'0.weight'", "'0.running_var'", "'1.bias'"});
    expect_error<Error>(
        [&] { clip_grad_norm_(plain, 1); }, {"shardwise: these are still on the meta device",
                                             "'number 0, counted from 0, of the parameters given to clip_grad_norm_'"});
    expect_error<ValueError>([&] { to_empty(plain); }, {"Sequential", "no units", "Give a device"});
    to_empty(plain, rank.device());
    ASSERT_EQ(full_state_dict(plain).size(), 7U);
    auto ours = on_meta(make);
    fully_shard(ours, sharded_on(rank));
    expect_error<ValueError>([&] { to_empty(ours, torch::kCUDA); }, {"cuda", "is on cpu", "Mesh(", "Leave out"});
    to_empty(ours, rank.device());
    ASSERT_EQ(full_state_dict(ours).size(), 7U);
  });
}

TEST(MetaContract, AllRanksOrNone) {
  run_ranks(2, [](Rank& rank) {
    auto ours = rank.rank() == 0 ? stack_on_meta() : Stack();
    expect_error<Error>(
        [&] { fully_shard(ours, sharded_on(rank)); },
        {"'embedding.weight'", "on the meta device on rank 0", "on rank 1", "wrap different modules"});
    torch::nn::BatchNorm1d norm(3);
    if (rank.rank() == 1) norm->running_var = norm->register_buffer("other", torch::zeros({3}, torch::kMeta));
    expect_error<Error>([&] { fully_shard(norm, sharded_on(rank)); }, {"the buffer 'other'", "meta device on rank 1"});
  });
}

TEST(MetaContract, ValuesThatAreThereStay) {
  run_ranks(2, [](Rank& rank) {
    struct HalfImpl : torch::nn::Module {
      torch::Tensor with = register_parameter("with", torch::full({4, 3}, 2.0));
      torch::Tensor without = register_parameter("without", torch::empty({5, 3}, torch::kMeta));
    };
    const auto ours = std::make_shared<HalfImpl>();
    const auto root = fully_shard(ours, sharded_on(rank));
    ASSERT_EQ(root.plan().units[0].groups.size(), 2U);
    ASSERT_EQ(root.plan().units[0].groups[1].device, "meta");
    expect_error<Error>([&] { (ours->with * 2).sum(); }, {"have no values: 'without'. Call"});
    to_empty(ours);
    ASSERT_EQ(root.plan().units[0].groups.size(), 1U) << "they travel together now";
    const auto state = full_state_dict(ours);
    ASSERT_TRUE(torch::equal(state["with"], torch::full({4, 3}, 2.0)));
    ASSERT_TRUE(torch::equal(state["without"], torch::zeros({5, 3})));
  });
}

TEST(MetaContract, TensorsWithADeviceOfTheirOwnStayThere) {
  const auto tensors = on_meta([] {
    const auto x = torch::ones({2}, torch::kCPU);
    return std::vector<torch::Tensor>{
        torch::randn({3}),
        torch::arange(4),
        torch::full({2}, 1.5),
        torch::scalar_tensor(2),
        x,
        torch::empty_like(x),
        torch::tensor({1, 2, 3}),
        x.clone(),
        x + 1,
    };
  });
  for (size_t i = 0; i < tensors.size(); ++i) ASSERT_EQ(tensors[i].is_meta(), i < 4) << i;
  ASSERT_FALSE(torch::ones({2}).is_meta());
  // What make() throws ends it too.
  ASSERT_THROW(on_meta([]() -> int { throw std::runtime_error("no"); }), std::runtime_error);
  ASSERT_FALSE(torch::ones({2}).is_meta());
}

// Each rank is a process: what it allocates is its own.
TEST(MetaContract, NothingOfFullSizeIsAllocated) {
  run_processes(2, [](Rank& rank) {
    TensorMemory::watch();
    set_shared_memory_listener(&TensorMemory::add);
    const auto make = [] {
      return torch::nn::Sequential(
          torch::nn::Linear(256, 512), torch::nn::Tanh(), torch::nn::Linear(512, 512), torch::nn::Tanh(),
          torch::nn::Linear(512, 256));
    };
    constexpr int64_t kFull = 4 * (256 * 512 + 512 + 512 * 512 + 512 + 512 * 256 + 256);
    constexpr int64_t kSmall = 32 * 1024;
    for (const auto layout : {ShardLayout::rows, ShardLayout::flat}) {
      const auto options = sharded_on(rank).layout(layout);
      // What the mesh and the process groups need once.
      fully_shard(torch::nn::Linear(2, 2), options);
      const auto before = TensorMemory::bytes();
      TensorMemory::forget_peak();
      auto ours = on_meta(make);
      ASSERT_EQ(TensorMemory::peak(), before);
      for (const size_t i : {0, 2, 4}) fully_shard(*ours->children()[i], options);
      const auto root = fully_shard(ours, options);
      ASSERT_LT(TensorMemory::peak() - before, kSmall);
      to_empty(ours);
      ASSERT_LT(TensorMemory::peak() - before, kFull / 2 + kSmall) << "the shards, and nothing beside them";
      int64_t shards = 0;
      for (const auto& unit : root.plan().units) {
        for (const auto& group : unit.groups) shards += group.shard_bytes;
      }
      ASSERT_GE(shards, kFull / 2);
      ASSERT_LT(std::abs(TensorMemory::bytes() - before - shards), kSmall);
      // Nor full copies where there are values.
      torch::nn::Linear with_values(512, 512);
      TensorMemory::forget_peak();
      const auto plain = TensorMemory::bytes();
      fully_shard(with_values, FullyShardOptions(options).broadcast(false));
      ASSERT_LT(TensorMemory::peak() - plain, 4 * 512 * 512 / 2 + kSmall) << "the shards beside the whole";
    }
  });
}

} // namespace shardwise::test
