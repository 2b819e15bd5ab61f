// One rank that trains a GPT, a few steps whenever it is told to.
//
//   rank_steps --wrap fully_shard --rank 0 --world 2 --store FILE --layers 6 --width 384 --heads 6
//              [--device cuda] [--batch 1] [--length 64] [--optimizer libtorch]
//
// Each line on its input is a number of steps, or `plan`; the answer is a line of JSON: the steps' seconds, and what
// was counted, or Plan::json(). benchmarks/python/rank_steps.py is the same with torch's wrappings.
#include <shardwise/shardwise.h>

#include "device_meter.h"
#include "distributed_gpt.h"
#include "rank_program.h"

#include <torch/torch.h>

#include <ctime>
#include <iostream>
#include <memory>
#include <sstream>

namespace {

/// Ours, or LibTorch's own, which computes parameter by parameter.
std::unique_ptr<torch::optim::Optimizer> make_optimizer(
    const std::string& name, const std::vector<torch::Tensor>& parameters) {
  const auto options = torch::optim::AdamWOptions(1e-4);
  if (name == "libtorch") return std::make_unique<torch::optim::AdamW>(parameters, options);
  return std::make_unique<shardwise::AdamW>(parameters, options);
}

shardwise::Mesh mesh_of(const std::string& wrap, const shardwise::MeshOptions& options) {
  const auto world = options.world_size();
  if (wrap == "hsdp") return shardwise::Mesh({{"copies", 2}, {"shards", world / 2}}, options);
  return shardwise::Mesh({{"ranks", world}}, options);
}

double seconds(clockid_t clock) {
  timespec time{};
  clock_gettime(clock, &time);
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

void run(const Arguments& given) {
  const auto options = mesh_options(given);
  const auto mesh = mesh_of(given.at("--wrap"), options);
  const auto resident_before = status_mib("VmRSS");
  const auto device = device_of(given);
  if (!device.is_cpu()) at::accelerator::setDeviceIndex(device.index());
  const DeviceMeter meter(device);
  const auto batch = std::stoll(value_or(given, "--batch", "1"));
  const auto length = std::stoll(value_or(given, "--length", "64"));
  GptOptions shape;
  shape.context = std::max<int64_t>(shape.context, length);
  shape.layers = std::stoll(given.at("--layers"));
  shape.width = std::stoll(given.at("--width"));
  shape.heads = std::stoll(given.at("--heads"));
  Gpt model(shape);
  initialize(*model, 1);
  model->to(device);
  const auto parameter_bytes = 4 * number_of_parameters(*model);
  const auto unit = distribute(model, given.at("--wrap"), mesh);
  const auto optimizer = make_optimizer(value_or(given, "--optimizer", "shardwise"), model->parameters());

  const auto random = at::make_generator<at::CPUGeneratorImpl>(static_cast<uint64_t>(mesh.rank()) + 1);
  say_ready();
  for (std::string line; std::getline(std::cin, line);) {
    if (line == "plan") {
      std::cout << (unit ? unit->plan().json() : "{}") << std::endl;
      continue;
    }
    const auto steps = std::stoi(line);
    const auto before = unit ? unit->counters() : shardwise::Counters();
    std::ostringstream wall;
    std::ostringstream host;
    std::ostringstream cpu;
    meter.forget_peak();
    for (int step = 0; step < steps; ++step) {
      const auto text = torch::randint(0, shape.vocabulary, {batch, length + 1}, random).to(device);
      for (const auto& axis : mesh.axes()) mesh.group(axis.name)->barrier()->wait();
      meter.synchronize();
      const auto wall_begin = seconds(CLOCK_MONOTONIC);
      const auto cpu_begin = seconds(CLOCK_PROCESS_CPUTIME_ID);
      model->zero_grad();
      const auto scores = model->forward(text.narrow(1, 0, length));
      torch::cross_entropy_loss(scores.flatten(0, 1), text.narrow(1, 1, length).flatten()).backward();
      optimizer->step();
      host << (step > 0 ? ", " : "") << seconds(CLOCK_MONOTONIC) - wall_begin;
      meter.synchronize();
      wall << (step > 0 ? ", " : "") << seconds(CLOCK_MONOTONIC) - wall_begin;
      cpu << (step > 0 ? ", " : "") << seconds(CLOCK_PROCESS_CPUTIME_ID) - cpu_begin;
    }
    const auto after = unit ? unit->counters() : shardwise::Counters();
    const auto count = [&](int64_t shardwise::Counters::*member) { return after.*member - before.*member; };
    std::cout << "{\"seconds\": [" << wall.str() << "], \"host_seconds\": [" << host.str() << "], \"cpu_seconds\": ["
              << cpu.str() << "]"
              << ", \"parameter_bytes\": " << parameter_bytes
              << ", \"all_gathers\": " << count(&shardwise::Counters::all_gathers)
              << ", \"reduce_scatters\": " << count(&shardwise::Counters::reduce_scatters)
              << ", \"all_reduces\": " << count(&shardwise::Counters::all_reduces)
              << ", \"collective_bytes\": " << count(&shardwise::Counters::collective_bytes)
              << ", \"gradient_copy_bytes\": " << count(&shardwise::Counters::copied_bytes)
              << ", \"parameter_copy_bytes\": " << count(&shardwise::Counters::unsharded_bytes)
              << ", \"allocations\": " << count(&shardwise::Counters::allocations)
              << ", \"tensor_bytes\": " << meter.bytes() << ", \"tensor_peak_bytes\": " << meter.peak_bytes()
              << ", \"resident_before_mib\": " << resident_before << ", \"resident_peak_mib\": " << status_mib("VmHWM")
              << "}" << std::endl;
  }
}

} // namespace

int main(int count, char** arguments) {
  return run_rank_program(count, arguments, run);
}
