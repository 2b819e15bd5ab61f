// estimate_memory() against the allocator: each rank is a process, so that what it allocates is its own. And
// estimate_time().
#include "ranks/fully_shard_models.h"
#include "ranks/held_sums.h"
#include "support/expect.h"
#include "support/processes.h"
#include "tensor_memory.h"

#include <thread>

namespace shardwise::test {
namespace {

/// Leaves sums that are under way in backward some time.
void pause_in_backward(const torch::Tensor& y) {
  if (!y.requires_grad()) return;
  y.register_hook([](const torch::Tensor&) { std::this_thread::sleep_for(std::chrono::milliseconds(10)); });
}

/// Where several sums may be under way, so many are.
HeldSums held_sums(1);

/// Large next to its activations. Each layer's backward leaves the sums of the one before time for both of their steps.
struct NetImpl : torch::nn::Module {
  NetImpl() {
    for (int i = 0; i < 4; ++i) {
      torch::nn::Tanh middle;
      register_forward_hook(*middle, [](torch::nn::Module&, HookTensors& outputs) { pause_in_backward(outputs[0]); });
      blocks->push_back(torch::nn::Sequential(torch::nn::Linear(256, 251), middle, torch::nn::Linear(251, 256)));
    }
    last = register_module("last", torch::nn::Linear(256, 130));
    count = register_buffer("count", torch::zeros({5000}));
  }
  torch::Tensor forward(const torch::Tensor& x) {
    auto y = first->forward(x);
    // By then all blocks have their gradients.
    if (y.requires_grad()) y.register_hook([](const torch::Tensor&) { held_sums.release_all(); });
    for (const auto& block : *blocks) {
      y = call(*block->as<torch::nn::Sequential>(), y);
      pause_in_backward(y);
    }
    return last->forward(y);
  }
  std::vector<const torch::nn::Module*> units() const {
    std::vector<const torch::nn::Module*> all;
    for (const auto& block : *blocks) all.push_back(block.get());
    return all;
  }
  torch::nn::Linear first = register_module("first", torch::nn::Linear(190, 256));
  torch::nn::ModuleList blocks = register_module("blocks", torch::nn::ModuleList());
  torch::nn::Linear last{nullptr};
  torch::Tensor count;
};
TORCH_MODULE(Net);

bool is_near(int64_t measured, int64_t estimated) {
  return std::abs(static_cast<double>(estimated - measured)) <= 0.02 * static_cast<double>(measured);
}

void assert_near(int64_t measured, int64_t estimated, const std::string& what) {
  ASSERT_PRED2(is_near, measured, estimated) << what;
}

struct Measured {
  int64_t forward = 0;
  int64_t backward = 0;
  int64_t after = 0;
};

/// Takes steps until the backwards of all ranks are as the estimate says. When a sum is done is up to the machine: a
/// late one holds gradients back.
Measured measure(
    Rank& rank, Net& net, torch::optim::Optimizer& optimizer, int64_t before, size_t sums, int64_t estimated) {
  constexpr int kSteady = 4, kMost = 100;
  const auto mesh = rank.mesh();
  Measured measured;
  for (int step = 0; step < kMost; ++step) {
    const auto x = batch(step, rank.rank(), 190, 1);
    optimizer.zero_grad();
    held_sums.set_most_held(sums);
    TensorMemory::forget_peak();
    auto loss = call(net, x).pow(2).mean();
    measured.forward = TensorMemory::peak() - before;
    TensorMemory::forget_peak();
    loss.backward();
    if (!is_near(measured.backward, estimated)) measured.backward = TensorMemory::peak() - before;
    loss = torch::Tensor();
    optimizer.step();
    measured.after = TensorMemory::bytes() - before;
    if (step < kSteady) measured.backward = 0;
    if (!mesh.any(!is_near(measured.backward, estimated))) break;
  }
  return measured;
}

void shard_net(Net& net, const FullyShardOptions& options, int64_t sums = 1) {
  const auto held = [](torch::Tensor& output, torch::Tensor& input, c10d::ProcessGroup& group) {
    return held_sums.start(output, input, group);
  };
  const auto shard = [&](torch::nn::Module& module) {
    auto unit = fully_shard(module, options).set_custom_reduce_scatter(scatter_by_all_reduce);
    if (sums > 1) unit.set_custom_reduce_scatter(held);
  };
  for (const auto& block : *net->blocks) shard(*block);
  shard(*net);
}

void check(
    Rank& rank, const std::string& what, const FullyShardOptions& options, EstimateOptions more = {},
    const std::function<void(Net&)>& prepare = [](Net&) {}) {
  SCOPED_TRACE(what);
  // The threads of a process group let go of what they had.
  std::this_thread::sleep_for(std::chrono::milliseconds(200));
  const auto before = TensorMemory::bytes();
  MemoryEstimate estimate;
  {
    auto plain = on_meta([] { return Net(); });
    prepare(plain);
    TensorMemory::forget_peak();
    const auto now = TensorMemory::bytes();
    estimate = estimate_memory(*plain, options, rank.world_size(), more.rank(rank.rank()).units(plain->units()));
    ASSERT_EQ(TensorMemory::peak(), now) << "nothing is allocated";
  }
  Net net;
  prepare(net);
  shard_net(net, options, more.reduce_scatter_max_input_buffers());
  unit(net)
      .set_reduce_scatter_max_input_buffers(more.reduce_scatter_max_input_buffers())
      .set_keep_unsharded_storage(more.keep_unsharded_storage());
  torch::optim::AdamW optimizer(net->parameters(), torch::optim::AdamWOptions(0.001));
  const auto sums = static_cast<size_t>(more.reduce_scatter_max_input_buffers());
  const auto measured = measure(rank, net, optimizer, before, sums, estimate.backward_peak);
  assert_near(measured.forward, estimate.forward_peak, "forward of " + what);
  assert_near(measured.backward, estimate.backward_peak, "backward of " + what);
  assert_near(measured.after, estimate.after_step, "after " + what);
}

void warm_up(Rank& rank) {
  TensorMemory::watch();
  set_shared_memory_listener(&TensorMemory::add);
  Net net;
  shard_net(net, sharded_on(rank));
  call(net, batch(0, 0, 190, 1)).sum().backward();
}

} // namespace

TEST(Estimate, ShardsOfTwoRanks) {
  run_processes(2, [](Rank& rank) {
    warm_up(rank);
    check(rank, "rows", sharded_on(rank));
    check(rank, "flat", sharded_on(rank).layout(ShardLayout::flat));
    check(rank, "three sums", sharded_on(rank), EstimateOptions().reduce_scatter_max_input_buffers(3));
    check(rank, "kept memory", sharded_on(rank), EstimateOptions().keep_unsharded_storage(true));
    check(rank, "frozen", sharded_on(rank), {}, [](Net& net) {
      (*net->blocks)[1]->as<torch::nn::Sequential>()->children()[0]->parameters()[0].set_requires_grad(false);
      net->last->weight.set_requires_grad(false);
    });
  });
}

TEST(Estimate, TimeOfWhatTravelsAndIsComputed) {
  torch::nn::Sequential net(
      torch::nn::Embedding(64, 64), torch::nn::Linear(torch::nn::LinearOptions(64, 64).bias(false)));
  const auto units = EstimateOptions().units({net[0].get(), net[1].get()}).device(torch::kCPU);
  constexpr double kBytes = 2 * 64 * 64 * 4;
  const auto links = Links().inside({1e6});
  // Three passes of what the other rank has; flags are a few bytes more.
  const auto sharded = estimate_time(net, FullyShardOptions(), 2, links, 1, units);
  EXPECT_NEAR(sharded.wire, 3 * kBytes / 2 / 1e6, 0.05 * sharded.wire);
  EXPECT_EQ(sharded.compute, 1);
  // Nothing is computed with the embedding's rows, so that its gather in forward and its sum hide behind nothing.
  EXPECT_GT(sharded.step, 1 + sharded.wire / 3);
  EXPECT_LT(sharded.step, 1 + sharded.wire);
  // Unless another module computes with them.
  torch::nn::Module tied;
  tied.register_module("net", net.ptr());
  tied.register_parameter("head", net[0]->as<torch::nn::Embedding>()->weight);
  const auto with_head = estimate_time(tied, FullyShardOptions(), 2, links, 1, units);
  EXPECT_EQ(with_head.wire, sharded.wire);
  EXPECT_LT(with_head.step, sharded.step);
  const auto copies = estimate_time(net, ReplicateOptions(), 2, links, 0, units);
  EXPECT_NEAR(copies.wire, kBytes / 1e6, 0.05 * copies.wire);
  EXPECT_EQ(copies.step, copies.wire);
  EXPECT_NE(sharded.table().find("waits for it"), std::string::npos);
  EXPECT_NE(sharded.json().find("\"wire\""), std::string::npos);
  const auto refused = [&](const Links& over, double compute, const std::string& text) {
    expect_error<ValueError>([&] { estimate_time(net, FullyShardOptions(), 4, over, compute, units); }, {text});
  };
  refused(Links(), 1, "the bandwidth within a host is 0; it must be positive");
  refused(Links().inside({1e6}).ranks_per_host(2), 1, "the bandwidth between hosts is 0");
  refused(Links().inside({1e6, -1}), 1, "a link's latency is -1; it must be 0 or more");
  refused(links, -1, "the time to compute is -1");
}

TEST(Estimate, RefusesWhatCannotBe) {
  run_ranks(2, [](Rank& rank) {
    Net net;
    const auto ask = [&](int64_t world, const EstimateOptions& more) {
      estimate_memory(*net, FullyShardOptions(), world, more);
    };
    expect_error<ValueError>([&] { ask(0, {}); }, {"0 ranks"});
    expect_error<ValueError>([&] { ask(2, EstimateOptions().optimizer_factor(-1)); }, {"optimizer_factor is -1"});
    expect_error<ValueError>(
        [&] { ask(2, EstimateOptions().units({net.get()})); }, {"a module in units() does not lie below this"});
    shard_net(net, sharded_on(rank));
    expect_error<Error>([&] { ask(2, {}); }, {"belongs to a unit already", "plan()"});
  });
}

} // namespace shardwise::test
