#include <shardwise/pipeline.h>

#include "base/forked.h"
#include "comm/mesh/axis_group.h"
#include "comm/mesh/gather_texts.h"
#include "observe/record.h"
#include "pipeline/run.h"
#include "pipeline/schedules.h"
#include "pipeline/simulate.h"

#include <shardwise/error.h>

#include <c10/util/StringUtil.h>

#include <chrono>
#include <optional>
#include <utility>

namespace shardwise {

using pipeline::Kind;
using pipeline::Table;

namespace {

/// A table counts in ints.
int count_of(const char* what, int64_t value) {
  if (std::in_range<int>(value)) return static_cast<int>(value);
  throw ValueError(c10::str("shardwise: Pipeline: ", value, " ", what, " are more than a schedule can have."));
}

Table table_for(const PipelineOptions& options, int64_t ranks) {
  const auto number = count_of("ranks", ranks);
  const auto microbatches = count_of("microbatches", options.microbatches());
  const auto stages = count_of("stages per rank", options.stages_per_rank());
  switch (options.schedule()) {
    case PipelineSchedule::gpipe:
      return pipeline::gpipe(number, microbatches);
    case PipelineSchedule::one_forward_one_backward:
      return pipeline::one_forward_one_backward(number, microbatches);
    case PipelineSchedule::interleaved:
      return pipeline::interleaved(number, stages, microbatches);
    case PipelineSchedule::looped_bfs:
      return pipeline::looped_bfs(number, stages, microbatches);
    case PipelineSchedule::interleaved_zero_bubble:
      return pipeline::interleaved_zero_bubble(number, stages, microbatches);
    case PipelineSchedule::zero_bubble_v:
      return pipeline::zero_bubble_v(number, microbatches);
    default:
      return pipeline::dual_pipe_v(number, microbatches);
  }
}

/// The same order without backwards, and what travels for them.
Table forward_only(Table table) {
  for (auto& actions : table.of_rank) {
    std::erase_if(actions, [](const auto& action) {
      return action.kind != Kind::forward && action.kind != Kind::send_forward && action.kind != Kind::receive_forward;
    });
  }
  return table;
}

} // namespace

struct Pipeline::State {
  State(const Mesh& on, std::string along, PipelineOptions given)
      : mesh(on),
        axis(std::move(along)),
        options(std::move(given)) {
    auto training = pipeline::with_transfers(table_for(options, mesh.size(axis)));
    const auto rank = static_cast<int>(mesh.coordinate(axis));
    evaluation = {forward_only(training), rank, mesh.rank()};
    step = {std::move(training), rank, mesh.rank()};
  }

  PipelineResult run(const pipeline::OwnPart& place, const Tensors& inputs, const Tensors& targets, bool is_training) {
    base::require_not_forked(forks, "this pipeline");
    const auto begin = std::chrono::steady_clock::now();
    std::optional<observe::Span> span;
    if (is_training && observe::recording()) span.emplace("step", "a step of the pipeline", mesh.rank());
    const auto group = comm::MeshGroups::transfer(mesh, axis);
    pipeline::Run one(place, stages, options, {group, mesh.device(), mesh.rank()});
    std::string error;
    try {
      if (is_training && !options.loss()) {
        throw ValueError(
            "shardwise: Pipeline: step() needs PipelineOptions().loss(), a function of outputs and targets.");
      }
      one.take(inputs, targets, is_training);
    } catch (const std::exception& failure) {
      error = c10::str("rank ", mesh.rank(), ": ", failure.what());
    }
    const auto mine = one.carry_out(error);
    std::string all;
    for (const auto& text : comm::gather_texts(mine, {ranks(group)}, at::kCPU, "the end of a step", counters)) {
      if (!text.empty()) all += "\n  " + text;
    }
    if (!all.empty()) {
      for (auto& stage : stages) stage.reset();
      throw Error(c10::str(
          "shardwise: Pipeline: a step failed on all ranks along '", axis,
          "', because of what follows. Drop its gradients (zero_grad()) before the next.", all));
    }
    auto result = one.result(!is_training);
    result.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    return result;
  }

  comm::Collectives ranks(const c10::intrusive_ptr<c10d::ProcessGroup>& group) const {
    return comm::Collectives({group, comm::MeshGroups::line(mesh, axis)});
  }

  Mesh mesh;
  std::string axis;
  PipelineOptions options;
  pipeline::OwnPart step;
  pipeline::OwnPart evaluation;
  std::vector<pipeline::Stage> stages;
  Counters counters;
  int64_t forks = base::forks();
};

Pipeline::Pipeline(
    const Mesh& mesh, const std::string& axis, const std::function<PipelineStage(int64_t stage)>& make,
    const PipelineOptions& options)
    : state_(std::make_unique<State>(mesh, axis, options)) {
  observe::open_program_record(mesh.rank());
  for (const auto number : stages_of(mesh, axis, options)) {
    state_->stages.emplace_back(static_cast<int>(number), make(number), options.gather_once());
  }
  pipeline::expect_units_apart(state_->stages);
}

Pipeline::~Pipeline() = default;
Pipeline::Pipeline(Pipeline&&) noexcept = default;
Pipeline& Pipeline::operator=(Pipeline&&) noexcept = default;

std::vector<int64_t> Pipeline::stages_of(const Mesh& mesh, const std::string& axis, const PipelineOptions& options) {
  const auto table = table_for(options, mesh.size(axis));
  std::vector<int64_t> own;
  for (int stage = 0; stage < table.stages(); ++stage) {
    if (table.rank_of_stage[static_cast<size_t>(stage)] == mesh.coordinate(axis)) own.push_back(stage);
  }
  return own;
}

int64_t Pipeline::stages() const {
  return state_->step.table.stages();
}

PipelineResult Pipeline::step(const Tensors& inputs, const Tensors& targets) {
  return state_->run(state_->step, inputs, targets, true);
}

PipelineResult Pipeline::evaluate(const Tensors& inputs, const Tensors& targets) {
  return state_->run(state_->evaluation, inputs, targets, false);
}

std::string Pipeline::table() const {
  return pipeline::text(state_->step.table);
}

std::vector<double> Pipeline::bubble() const {
  return pipeline::simulate(table_for(state_->options, state_->mesh.size(state_->axis))).bubble;
}

} // namespace shardwise
