// One rank that trains a GPT over a wire that is as slow as it is told to be.
//
//   overlap --wrap fully_shard --rank 0 --world 2 --store FILE --layers 6 --width 384
//
// Each line on its input is `STEPS LATENCY MEGABYTES PREFETCH`: a number of steps, microseconds, megabytes a second (0:
// no slower than the wire that there is), and whether units are gathered ahead. The answer is a line of JSON: the
// steps' seconds, for how long the wire was busy in each on the average, and the bytes of each. The line `estimate
// COMPUTE LATENCY MEGABYTES` has a step's seconds over the wire that there is; the answer is what estimate_time() says.
#include <shardwise/shardwise.h>

#include "comm/mesh/axis_group.h"
#include "distributed_gpt.h"
#include "host_wire.h"
#include "rank_program.h"

#include <torch/torch.h>

#include <iostream>
#include <sstream>

namespace {

using Clock = std::chrono::steady_clock;

double step(Gpt& model, torch::optim::Optimizer& optimizer, const shardwise::Mesh& mesh, const at::Tensor& text) {
  mesh.group("ranks")->barrier()->wait();
  const auto begin = Clock::now();
  optimizer.zero_grad();
  const auto length = text.size(1) - 1;
  const auto scores = model->forward(text.narrow(1, 0, length));
  torch::cross_entropy_loss(scores.flatten(0, 1), text.narrow(1, 1, length).flatten()).backward();
  optimizer.step();
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

/// Takes the place of the group's back end for CPUs.
void put_into(c10d::ProcessGroup& group, Wire& wire) {
  // A type that no group has yet: a group keeps its first back end of each type.
  group.setBackend(
      c10::DeviceType::CPU, c10d::ProcessGroup::BackendType::MPI, wire.over(group.getBackend(c10::DeviceType::CPU)));
}

std::string estimate(const GptOptions& shape, const std::string& wrap, int64_t world, std::istream& words) {
  double compute = 0;
  double latency = 0;
  double megabytes = 0;
  words >> compute >> latency >> megabytes;
  Gpt model(shape);
  std::vector<const torch::nn::Module*> blocks;
  for (const auto& block : *model->blocks) blocks.push_back(block.get());
  const auto links = shardwise::Links().inside({1e6 * megabytes, 1e-6 * latency});
  const auto more = shardwise::EstimateOptions().units(blocks).device(torch::kCPU);
  if (wrap == "replicate")
    return estimate_time(model, shardwise::ReplicateOptions(), world, links, compute, more).json();
  return estimate_time(model, sharding_options(wrap), world, links, compute, more).json();
}

void run(const Arguments& given) {
  const auto world = std::stoi(given.at("--world"));
  const shardwise::Mesh mesh({{"ranks", world}}, mesh_options(given));
  const auto wire = std::make_shared<HostWire>();
  put_into(*shardwise::comm::MeshGroups::sum(mesh, "ranks"), *wire);
  put_into(*shardwise::comm::MeshGroups::gather(mesh, "ranks"), *wire);
  GptOptions shape;
  shape.layers = std::stoll(given.at("--layers"));
  shape.width = std::stoll(given.at("--width"));
  Gpt model(shape);
  initialize(*model, 1);
  auto unit = distribute(model, given.at("--wrap"), mesh).value();
  torch::optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(1e-3));
  const auto text = torch::randint(0, shape.vocabulary, {2, 65});
  say_ready();
  for (std::string line; std::getline(std::cin, line);) {
    std::istringstream words(line);
    if (line.starts_with("estimate ")) {
      words.ignore(sizeof "estimate");
      std::cout << estimate(shape, given.at("--wrap"), world, words) << std::endl;
      continue;
    }
    int steps = 0;
    double latency = 0;
    double megabytes = 0;
    bool prefetches = true;
    if (!(words >> steps >> latency >> megabytes >> prefetches)) {
      throw std::invalid_argument("overlap: not an order: " + line);
    }
    unit.set_prefetch(prefetches);
    wire->set_speed({std::chrono::duration<double>(1e-6 * latency), 1e6 * megabytes});
    // The order of use is learnt anew.
    step(model, optimizer, mesh, text);
    const auto busy = wire->busy();
    const auto bytes = wire->bytes();
    std::ostringstream seconds;
    for (int i = 0; i < steps; ++i) seconds << (i > 0 ? ", " : "") << step(model, optimizer, mesh, text);
    std::cout << "{\"seconds\": [" << seconds.str() << "], \"busy_seconds\": " << (wire->busy() - busy).count() / steps
              << ", \"bytes\": " << (wire->bytes() - bytes) / steps << "}" << std::endl;
  }
}

} // namespace

int main(int count, char** arguments) {
  return run_rank_program(count, arguments, run);
}
