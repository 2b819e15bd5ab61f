// What it costs to wrap a model of many parameter tensors, with collectives that do nothing.
//
//   setup_cost --sizes 100x100x2,200x100x2 [--only fully_shard]     blocks, parameters in each, ranks; the wrappings
//
// Under callgrind each case leaves a file of counts; alone it prints CPU seconds and the growth of the resident set.
#include <shardwise/shardwise.h>

#include "blocks.h"
#include "instant_group.h"
#include "meters.h"

#include <torch/torch.h>

#include <ctime>
#include <fstream>
#include <iostream>

namespace {

double cpu_seconds() {
  timespec time{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

/// In kB.
int64_t resident() {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    if (line.starts_with("VmRSS:")) return std::stoll(line.substr(6));
  }
  return 0;
}

template <typename Wrap>
void measure(const std::string& name, const Size& size, const Wrap& wrap) {
  if (!wanted(name)) return;
  const auto backend = c10::make_intrusive<InstantBackend>(0, size.ranks);
  const auto mesh = shardwise::Mesh::from_process_groups({"world"}, {instant_group(backend)}, torch::kCPU);
  Model model(size);
  const auto before = resident();
  const auto begin = cpu_seconds();
  meters_start();
  meters_zero();
  for (auto& block : model->blocks) wrap(*block, mesh);
  wrap(*model, mesh);
  meters_dump(c10::str(name, " ", size.text(), " 1").c_str());
  meters_stop();
  std::cout << "{\"name\": \"" << name << "\", \"size\": \"" << size.text()
            << "\", \"seconds\": " << cpu_seconds() - begin << ", \"resident_kb\": " << resident() - before << "}"
            << std::endl;
}

} // namespace

int main(int count, char** arguments) {
  using shardwise::Mesh;
  using torch::nn::Module;
  return run_sizes(count, arguments, [](const Size& size) {
    measure("fully_shard", size, [](Module& m, const Mesh& mesh) {
      return fully_shard(m, shardwise::FullyShardOptions().mesh(mesh));
    });
    measure("replicate", size, [](Module& m, const Mesh& mesh) {
      return replicate(m, shardwise::ReplicateOptions().mesh(mesh));
    });
  });
}
