// What wrapping costs the host: a forward and backward over blocks of tiny tensors, with collectives that do nothing.
//
//   host_cost --sizes 8x9x2,32x9x2 [--only none,replicate]     blocks, parameters in each, ranks; the cases
//   host_cost --probe                                          says whether instructions can be counted
//
// Under callgrind each case leaves files of counts, of kFew and of kMany steps, each some times over, for now and then
// a step does what others do not (a table grows); alone it prints the microseconds of the fastest step. Both ways it
// prints what a wrapped model's counters say of a step. benchmarks/python/host_cost.py measures torch's wrappings in
// the same way.
#include <shardwise/shardwise.h>

#include "blocks.h"
#include "counted.h"
#include "instant_group.h"
#include "meters.h"

#include <torch/torch.h>

#include <ctime>
#include <iostream>
#include <utility>

namespace {

constexpr int kWarm = 3;
constexpr int kFew = 1;
constexpr int kMany = 3;
constexpr int kTimes = 4;
constexpr int kTimed = 40;

torch::Tensor forward(const Block& block, const torch::Tensor& x) {
  return block.ptr()->forward(x);
}

double cpu_seconds() {
  timespec time{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

template <typename Step>
void measure(const std::string& name, const Size& size, const Step& step) {
  if (!wanted(name)) return;
  for (int i = 0; i < kWarm; ++i) step();
  if (meters_count_instructions() != 0) {
    meters_start();
    step();
    for (int time = 0; time < kTimes; ++time) {
      for (const auto steps : {kFew, kMany}) {
        meters_zero();
        for (int i = 0; i < steps; ++i) step();
        meters_dump(c10::str(name, " ", size.text(), " ", steps).c_str());
      }
    }
    meters_stop();
    return;
  }
  double best = 1e9;
  for (int i = 0; i < kTimed; ++i) {
    const auto begin = cpu_seconds();
    step();
    best = std::min(best, cpu_seconds() - begin);
  }
  std::cout << name << " " << size.text() << " " << best * 1e6 << std::endl;
}

template <typename Call>
void train(Model& model, const Call& call) {
  model->run(torch::ones({8, 4}), call).sum().backward();
  model->zero_grad();
}

template <typename Call>
void measure_training(const std::string& name, const Size& size, Model& model, const Call& call) {
  measure(name, size, [&] { train(model, call); });
}

/// Wraps blocks and model with `wrap`, over ranks of which this is the first.
template <typename Wrap>
void measure_wrapped(const std::string& name, const Size& size, const Wrap& wrap) {
  if (!wanted(name)) return;
  const auto backend = c10::make_intrusive<InstantBackend>(0, size.ranks);
  const auto mesh = shardwise::Mesh::from_process_groups({"world"}, {instant_group(backend)}, torch::kCPU);
  Model model(size);
  for (auto& block : model->blocks) wrap(*block, mesh);
  const shardwise::Unit unit = wrap(*model, mesh);
  backend->answers = false;
  measure_training(name, size, model, forward);
  const auto before = unit.counters();
  train(model, forward);
  print_counters(c10::str("counters ", name, " ", size.text()), before, unit.counters());
}

shardwise::FullyShardOptions sharded(const shardwise::Mesh& mesh) {
  return shardwise::FullyShardOptions().mesh(mesh);
}

void measure_wrappings(const Size& size) {
  using shardwise::Mesh;
  using torch::nn::Module;
  if (wanted("none")) {
    Model plain(size);
    measure_training("none", size, plain, forward);
  }
  measure_wrapped("fully_shard", size, [](Module& m, const Mesh& mesh) { return fully_shard(m, sharded(mesh)); });
  measure_wrapped("fully_shard_keep", size, [](Module& m, const Mesh& mesh) {
    return fully_shard(m, sharded(mesh).reshard_after_forward(false));
  });
  measure_wrapped("fully_shard_flat", size, [](Module& m, const Mesh& mesh) {
    return fully_shard(m, sharded(mesh).layout(shardwise::ShardLayout::flat));
  });
  measure_wrapped("replicate", size, [](Module& m, const Mesh& mesh) {
    return replicate(m, shardwise::ReplicateOptions().mesh(mesh));
  });
}

struct NothingImpl : torch::nn::Module {
  torch::Tensor forward(const torch::Tensor& x) {
    return x;
  }
};
TORCH_MODULE(Nothing);

/// Calls that can be seen, of a module that does nothing, and checkpoints around blocks.
void measure_calls(const Size& size) {
  Nothing module;
  const auto x = torch::ones({8, 4});
  const auto measure_call = [&](const std::string& name) {
    measure(name, size, [&] {
      for (int64_t i = 0; i < size.blocks; ++i) shardwise::call(module, x);
    });
  };
  measure_call("call");
  shardwise::register_forward_pre_hook(*module, [](torch::nn::Module&, shardwise::HookTensors&) {});
  measure_call("call_hook");

  Model plain(size);
  const auto input = torch::ones({8, 4});
  measure("forward", size, [&] { plain->run(input, forward); });
  measure_training("checkpoint", size, plain, [](const Block& block, const torch::Tensor& x) {
    return shardwise::checkpoint([block](const torch::Tensor& input) { return forward(block, input); }, x);
  });
}

} // namespace

int main(int count, char** arguments) {
  if (count == 2 && std::string(arguments[1]) == "--probe") {
    std::cout << (meters_can_count() != 0 ? "counts" : "does not count") << std::endl;
    return 0;
  }
  bool first = true;
  return run_sizes(count, arguments, [&](const Size& size) {
    measure_wrappings(size);
    if (std::exchange(first, false)) measure_calls(size);
  });
}
