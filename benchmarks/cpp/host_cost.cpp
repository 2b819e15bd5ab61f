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
#include "host_parallelism.h"
#include "instant_group.h"
#include "measured.h"

#include <torch/torch.h>

#include <iostream>
#include <utility>

namespace {

torch::Tensor forward(const Block& block, const torch::Tensor& x) {
  return block.ptr()->forward(x);
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
    return shardwise::activation_checkpoint([block](const torch::Tensor& input) { return forward(block, input); }, x);
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
    if (!std::exchange(first, false)) return;
    measure_calls(size);
    measure_parallelism(size);
  });
}
