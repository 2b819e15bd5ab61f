// One rank that runs collectives over both transports in turns.
//
//   collectives --rank 0 --world 2 --store FILE
//
// Each line on its input is an operation, a number of bytes of the whole tensor, and a number of rounds; the answer is
// a line of JSON: the seconds of each round, for each transport.
#include <shardwise/shardwise.h>

#include "rank_program.h"

#include <torch/torch.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <chrono>
#include <functional>
#include <iostream>
#include <sstream>

namespace {

using Group = c10::intrusive_ptr<c10d::ProcessGroup>;

/// A collective on tensors of its own; the last one of a round is waited for.
std::function<void()> collective(const std::string& name, const Group& group, int64_t bytes) {
  const auto world = group->getSize();
  const auto part = std::max<int64_t>(bytes / 4 / world, 1);
  auto whole = torch::ones({part * world});
  if (name == "all_reduce") {
    return [=] {
      std::vector<at::Tensor> tensors{whole};
      c10d::AllreduceOptions options;
      options.reduceOp = c10d::ReduceOp::AVG;
      group->allreduce(tensors, options)->wait();
    };
  }
  auto mine = torch::ones({part});
  if (name == "all_gather") {
    return [=]() mutable { group->_allgather_base(whole, mine)->wait(); };
  }
  if (name == "reduce_scatter") {
    return [=]() mutable { group->_reduce_scatter_base(mine, whole)->wait(); };
  }
  throw std::invalid_argument("collectives: there is no operation " + name + ".");
}

double seconds_of(const std::function<void()>& run, int calls) {
  const auto begin = std::chrono::steady_clock::now();
  for (int call = 0; call < calls; ++call) run();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count() / calls;
}

void run(const Arguments& given) {
  const auto options = mesh_options(given);
  std::vector<shardwise::Mesh> meshes;
  for (const auto transport : {shardwise::Transport::direct, shardwise::Transport::gloo}) {
    const auto name = std::to_string(meshes.size());
    meshes.emplace_back(
        std::vector<shardwise::Axis>{{"world", options.world_size()}},
        shardwise::MeshOptions(options).transport(transport).store(
            c10::make_intrusive<c10d::PrefixStore>(name, options.store())));
  }
  say_ready();
  std::string operation;
  int64_t bytes = 0;
  int rounds = 0;
  while (std::cin >> operation >> bytes >> rounds) {
    // Small ones several times a round.
    const auto calls = static_cast<int>(std::clamp<int64_t>((1 << 20) / bytes, 1, 16));
    std::vector<std::ostringstream> times(meshes.size());
    std::vector<std::function<void()>> runs;
    for (const auto& mesh : meshes) runs.push_back(collective(operation, mesh.group("world"), bytes));
    for (int round = -1; round < rounds; ++round) {
      for (size_t i = 0; i < meshes.size(); ++i) {
        meshes[1].group("world")->barrier()->wait();
        const auto seconds = seconds_of(runs[i], calls);
        if (round >= 0) times[i] << (round > 0 ? ", " : "") << seconds;
      }
    }
    std::cout << "{\"direct\": [" << times[0].str() << "], \"gloo\": [" << times[1].str() << "]}" << std::endl;
  }
}

} // namespace

int main(int count, char** arguments) {
  return run_rank_program(count, arguments, run);
}
