#pragma once

// Stages of pipelines, and the same model in one process.
#include "ranks/training_models.h"

namespace shardwise::test {

using StageTensors = std::vector<torch::Tensor>;

constexpr int64_t kStageWidth = 6;

struct ScheduleCase {
  PipelineSchedule schedule;
  int64_t stages_per_rank;
};

inline const std::vector<ScheduleCase> kSchedules{
    {PipelineSchedule::gpipe, 1},
    {PipelineSchedule::one_forward_one_backward, 1},
    {PipelineSchedule::interleaved, 2},
    {PipelineSchedule::looped_bfs, 2},
    {PipelineSchedule::interleaved_zero_bubble, 2},
    {PipelineSchedule::zero_bubble_v, 2},
    {PipelineSchedule::dual_pipe_v, 2}};

inline torch::Tensor mean_loss(const StageTensors& outputs, const StageTensors& targets) {
  return (outputs[0] - targets[0]).pow(2).mean();
}

inline PipelineOptions options_of(const ScheduleCase& each, int64_t microbatches) {
  return PipelineOptions()
      .schedule(each.schedule)
      .stages_per_rank(each.stages_per_rank)
      .microbatches(microbatches)
      .loss(mean_loss);
}

/// Stage `number` of a model, the same everywhere.
inline Mlp stage_model(int64_t number, torch::ScalarType dtype = torch::kDouble) {
  Mlp model(kStageWidth);
  fill(*model, 100 + number);
  model->to(dtype);
  return model;
}

inline torch::Tensor rows_of(int step, int64_t replica, int64_t rows, torch::ScalarType dtype = torch::kDouble) {
  return torch::randn({rows, kStageWidth}, generator(1000 + 10 * step + replica)).to(dtype);
}

/// By number.
using Stages = std::map<int64_t, Mlp>;

inline std::vector<torch::Tensor> parameters_of(const Stages& stages) {
  std::vector<torch::Tensor> all;
  for (const auto& [number, model] : stages) {
    for (const auto& parameter : model->parameters()) all.push_back(parameter);
  }
  return all;
}

/// All stages in one process.
struct WholePipeline {
  explicit WholePipeline(int64_t stages) {
    for (int64_t i = 0; i < stages; ++i) models.emplace(i, stage_model(i));
  }
  torch::Tensor forward(torch::Tensor x) {
    for (auto& [number, model] : models) x = model->forward(x);
    return x;
  }
  Stages models;
};

/// The stages of a rank, as a pipeline makes them.
struct OwnStages {
  PipelineStage operator()(int64_t number) {
    return PipelineStage(models.insert_or_assign(number, stage_model(number)).first->second);
  }
  Stages models;
};

/// Values and gradients are those of one process.
inline void assert_stages(const Stages& own, const WholePipeline& reference, const std::string& what) {
  for (const auto& [number, model] : own) {
    const auto whole = reference.models.at(number)->named_parameters();
    for (const auto& entry : model->named_parameters()) {
      const auto text = c10::str(what, ", stage ", number, ": ", entry.key());
      const auto& expected = whole[entry.key()];
      ASSERT_TRUE(torch::allclose(entry.value(), expected, 1e-9, 1e-11)) << text;
      ASSERT_TRUE(torch::allclose(entry.value().grad(), expected.grad(), 1e-9, 1e-11)) << "gradient, " << text;
    }
  }
}

inline std::shared_ptr<AdamW> optimizer_of(const std::vector<torch::Tensor>& parameters) {
  return std::make_shared<AdamW>(parameters, torch::optim::AdamWOptions(0.05).eps(0.1));
}

} // namespace shardwise::test
