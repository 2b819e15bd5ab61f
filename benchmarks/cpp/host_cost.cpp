// What wrapping costs the host: a forward and backward over blocks of tiny tensors, with collectives that do nothing.
//
//   host_cost --blocks 8,32 [--only none,replicate]
//   host_cost --probe         says whether instructions are counted
//
// Under callgrind each case leaves two files of counts, of kFew and of kMany steps; alone it prints the microseconds of
// the fastest step. benchmarks/python/host_cost.py measures torch's wrappings in the same way.
#include <shardwise/shardwise.h>

#include "instant_group.h"
#include "meters.h"

#include <c10/util/StringUtil.h>
#include <torch/torch.h>

#include <algorithm>
#include <ctime>
#include <iostream>
#include <sstream>

namespace {

constexpr int kParameters = 9;
constexpr int kWarm = 5;
constexpr int kFew = 1;
constexpr int kMany = 5;
constexpr int kTimed = 40;

/// One operation a parameter.
struct BlockImpl : torch::nn::Module {
  BlockImpl() {
    for (int i = 0; i < kParameters; ++i) {
      weights.push_back(register_parameter(c10::str("w", i), torch::ones({8, 4})));
    }
  }
  torch::Tensor forward(torch::Tensor x) {
    for (const auto& weight : weights) x = x * weight;
    return x;
  }
  std::vector<torch::Tensor> weights;
};
TORCH_MODULE(Block);

struct ModelImpl : torch::nn::Module {
  explicit ModelImpl(int64_t count) {
    for (int64_t i = 0; i < count; ++i) blocks.push_back(register_module(c10::str("block", i), Block()));
  }
  template <typename Call>
  torch::Tensor run(torch::Tensor x, const Call& call) {
    for (const auto& block : blocks) x = call(block, x);
    return x;
  }
  std::vector<Block> blocks;
};
TORCH_MODULE(Model);

torch::Tensor forward(const Block& block, const torch::Tensor& x) {
  return block.ptr()->forward(x);
}

double cpu_seconds() {
  timespec time{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

/// The cases that are measured; all where there are none.
std::vector<std::string> only;

bool wanted(const std::string& name) {
  return only.empty() || std::find(only.begin(), only.end(), name) != only.end();
}

template <typename Step>
void measure(const std::string& name, int64_t blocks, const Step& step) {
  if (!wanted(name)) return;
  for (int i = 0; i < kWarm; ++i) step();
  if (meters_count_instructions() != 0) {
    for (const auto steps : {kFew, kMany}) {
      meters_zero();
      for (int i = 0; i < steps; ++i) step();
      meters_dump(c10::str(name, " ", blocks, " ", steps).c_str());
    }
    return;
  }
  double best = 1e9;
  for (int i = 0; i < kTimed; ++i) {
    const auto begin = cpu_seconds();
    step();
    best = std::min(best, cpu_seconds() - begin);
  }
  std::cout << name << " " << blocks << " " << best * 1e6 << std::endl;
}

template <typename Call>
void measure_training(const std::string& name, Model& model, const Call& call) {
  const auto input = torch::ones({8, 4});
  measure(name, static_cast<int64_t>(model->blocks.size()), [&] {
    model->run(input, call).sum().backward();
    model->zero_grad();
  });
}

/// Wraps blocks and model with `wrap`, over two ranks of which this is one.
template <typename Wrap>
void measure_wrapped(const std::string& name, int64_t blocks, const Wrap& wrap) {
  if (!wanted(name)) return;
  const auto backend = c10::make_intrusive<InstantBackend>(0, 2);
  const auto mesh = shardwise::Mesh::from_process_groups({"world"}, {instant_group(backend)}, torch::kCPU);
  Model model(blocks);
  for (auto& block : model->blocks) wrap(*block, mesh);
  wrap(*model, mesh);
  backend->answers = false;
  measure_training(name, model, forward);
}

shardwise::FullyShardOptions sharded(const shardwise::Mesh& mesh) {
  return shardwise::FullyShardOptions().mesh(mesh);
}

void measure_wrappings(int64_t blocks) {
  using shardwise::Mesh;
  using torch::nn::Module;
  Model plain(blocks);
  measure_training("none", plain, forward);
  measure_wrapped("fully_shard", blocks, [](Module& m, const Mesh& mesh) { fully_shard(m, sharded(mesh)); });
  measure_wrapped("fully_shard_keep", blocks, [](Module& m, const Mesh& mesh) {
    fully_shard(m, sharded(mesh).reshard_after_forward(false));
  });
  measure_wrapped("fully_shard_flat", blocks, [](Module& m, const Mesh& mesh) {
    fully_shard(m, sharded(mesh).layout(shardwise::ShardLayout::flat));
  });
  measure_wrapped(
      "replicate", blocks, [](Module& m, const Mesh& mesh) { replicate(m, shardwise::ReplicateOptions().mesh(mesh)); });
}

struct NothingImpl : torch::nn::Module {
  torch::Tensor forward(const torch::Tensor& x) {
    return x;
  }
};
TORCH_MODULE(Nothing);

/// Calls that can be seen, of a module that does nothing, and checkpoints around blocks.
void measure_calls(int64_t blocks) {
  Nothing module;
  const auto x = torch::ones({8, 4});
  const auto measure_call = [&](const std::string& name) {
    measure(name, blocks, [&] {
      for (int64_t i = 0; i < blocks; ++i) shardwise::call(module, x);
    });
  };
  measure_call("call");
  shardwise::register_forward_pre_hook(*module, [](torch::nn::Module&, shardwise::HookTensors&) {});
  measure_call("call_hook");

  Model plain(blocks);
  const auto input = torch::ones({8, 4});
  measure("forward", blocks, [&] { plain->run(input, forward); });
  measure_training("checkpoint", plain, [](const Block& block, const torch::Tensor& x) {
    return shardwise::checkpoint([block](const torch::Tensor& input) { return forward(block, input); }, x);
  });
}

std::vector<std::string> split(const std::string& text) {
  std::vector<std::string> result;
  std::istringstream parts(text);
  for (std::string part; std::getline(parts, part, ',');) result.push_back(part);
  return result;
}

} // namespace

int main(int count, char** arguments) {
  try {
    if (count == 2 && std::string(arguments[1]) == "--probe") {
      std::cout << (meters_count_instructions() != 0 ? "counts" : "does not count") << std::endl;
      return 0;
    }
    const std::vector<std::string> words(arguments + 1, arguments + count);
    const bool some = words.size() == 4 && words[2] == "--only";
    if (words.size() < 2 || words[0] != "--blocks" || (words.size() > 2 && !some)) {
      throw std::invalid_argument("host_cost: the arguments are --blocks 8,32 and perhaps --only none,replicate.");
    }
    if (some) only = split(words[3]);
    torch::set_num_threads(1);
    meters_start();
    const auto sizes = split(words[1]);
    for (const auto& blocks : sizes) measure_wrappings(std::stoll(blocks));
    measure_calls(std::stoll(sizes.front()));
  } catch (const std::exception& error) {
    std::cerr << error.what() << std::endl;
    return 1;
  }
}
