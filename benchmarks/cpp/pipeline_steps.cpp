// One rank of a pipeline whose stages cost the same.
//
//   pipeline_steps --rank 0 --world 2 --store FILE --width 256 --rows 64 --microbatches 8
//
// Each line on its input is a schedule and a number of steps. The answer is a line of JSON: for which share of a step
// this rank waits as the schedule's table has it, and for which it did in each step.
#include <shardwise/shardwise.h>

#include "rank_program.h"

#include <torch/torch.h>

#include <iostream>
#include <sstream>

namespace {

using Tensors = std::vector<at::Tensor>;

const std::map<std::string, shardwise::PipelineSchedule> kSchedules{
    {"gpipe", shardwise::PipelineSchedule::gpipe},
    {"one_forward_one_backward", shardwise::PipelineSchedule::one_forward_one_backward},
    {"interleaved", shardwise::PipelineSchedule::interleaved},
    {"interleaved_zero_bubble", shardwise::PipelineSchedule::interleaved_zero_bubble},
    {"zero_bubble_v", shardwise::PipelineSchedule::zero_bubble_v}};

torch::nn::Sequential stage(int64_t width, int layers) {
  torch::nn::Sequential model;
  for (int i = 0; i < layers; ++i) model->push_back(torch::nn::Linear(width, width));
  return model;
}

void run(const Arguments& given) {
  const shardwise::Mesh mesh({{"pp", std::stoi(given.at("--world"))}}, mesh_options(given));
  const auto width = std::stoll(given.at("--width"));
  const auto microbatches = std::stoll(given.at("--microbatches"));
  // With a gradient, or the first stage would have less to compute than the others.
  const auto x = torch::ones({std::stoll(given.at("--rows")) * microbatches, width}).requires_grad_();
  say_ready();
  std::string name;
  int steps = 0;
  while (std::cin >> name >> steps) {
    const auto schedule = kSchedules.at(name);
    const bool is_one = name == "gpipe" || name == "one_forward_one_backward";
    shardwise::Pipeline pipeline(
        mesh, "pp", [&](int64_t /*stage*/) { return shardwise::PipelineStage(stage(width, is_one ? 8 : 4)); },
        shardwise::PipelineOptions()
            .schedule(schedule)
            .microbatches(microbatches)
            .loss([](const Tensors& outputs, const Tensors& /*targets*/) { return outputs[0].mean(); }));
    std::ostringstream waits;
    for (int step = -1; step < steps; ++step) {
      mesh.barrier();
      const auto result = pipeline.step({x}, {x.detach()});
      if (step >= 0) waits << (step > 0 ? ", " : "") << 1 - result.busy_seconds / result.seconds;
    }
    std::cout << "{\"predicted\": " << pipeline.bubble()[static_cast<size_t>(mesh.coordinate("pp"))] << ", \"waits\": ["
              << waits.str() << "]}" << std::endl;
  }
}

} // namespace

int main(int count, char** arguments) {
  return run_rank_program(count, arguments, run);
}
