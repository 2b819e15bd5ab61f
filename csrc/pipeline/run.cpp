#include "pipeline/run.h"

#include "base/reason.h"
#include "observe/record.h"

#include <shardwise/error.h>

#include <ATen/ops/cat.h>
#include <ATen/ops/full_like.h>
#include <c10/core/GradMode.h>
#include <c10/util/StringUtil.h>
#include <torch/csrc/autograd/autograd.h>

#include <algorithm>

namespace shardwise::pipeline {

using Tensors = Run::Tensors;

Run::Run(const OwnPart& place, std::vector<Stage>& stages, const PipelineOptions& options, Transfers transfers)
    : place_(place),
      stages_(stages),
      options_(options),
      transfers_(std::move(transfers)) {}

namespace {

/// By microbatch: parts along dimension 0, as equal as can be.
std::vector<Tensors> cut(const Tensors& batch, int64_t microbatches, const char* what) {
  std::vector<Tensors> parts(static_cast<size_t>(microbatches));
  for (const auto& tensor : batch) {
    if (tensor.defined() && tensor.dim() > 0 && tensor.size(0) == batch.front().size(0) &&
        tensor.size(0) >= microbatches) {
      const auto pieces = tensor.tensor_split(microbatches, 0);
      for (size_t i = 0; i < parts.size(); ++i) parts[i].push_back(pieces[i]);
      continue;
    }
    throw ValueError(c10::str(
        "shardwise: Pipeline: ", what, " of ",
        tensor.defined() ? c10::str("sizes ", tensor.sizes()) : std::string("no sizes (undefined)"),
        " cannot be cut into ", microbatches,
        " microbatches: all must have the same number of rows, and at least one row for each microbatch."));
  }
  return parts;
}

} // namespace

void Run::take(const Tensors& inputs, const Tensors& targets, bool is_training) {
  is_training_ = is_training;
  const auto count = options_.microbatches();
  if (place_.has(0)) {
    if (inputs.empty()) throw ValueError("shardwise: Pipeline: the rank with the first stage must give inputs.");
    inputs_ = cut(inputs, count, "an input");
  }
  if (!place_.has(place_.table.stages() - 1)) return;
  targets_ = cut(targets, count, "a target");
  weights_.assign(static_cast<size_t>(count), options_.mean() ? 1.0 / static_cast<double>(count) : 1.0);
  if (options_.mean() && !targets.empty()) {
    const auto rows = static_cast<double>(targets.front().size(0));
    for (size_t i = 0; i < weights_.size(); ++i) weights_[i] = static_cast<double>(targets_[i].front().size(0)) / rows;
  }
  losses_.resize(static_cast<size_t>(count));
  outputs_.resize(static_cast<size_t>(count));
}

Stage& Run::stage(int number) {
  return *std::find_if(stages_.begin(), stages_.end(), [&](const Stage& each) { return each.number() == number; });
}

Message Run::message(const Action& transfer) const {
  const bool is_forward = transfer.kind == Kind::send_forward || transfer.kind == Kind::receive_forward;
  const auto receiver = is_send(transfer.kind) ? other_end(transfer) : transfer.stage;
  const auto first = is_forward ? 0 : place_.table.stages();
  return {
      .peer = place_.rank_of(other_end(transfer)),
      .number = (first + receiver) * place_.table.microbatches + transfer.microbatch,
      .what = c10::str(
          is_forward ? "the inputs" : "the gradients of the outputs", " of stage ", receiver, " for microbatch ",
          transfer.microbatch)};
}

void Run::receive(const Action& action) {
  auto& cell = cells_[{action.stage, action.microbatch}];
  auto& arriving = action.kind == Kind::receive_forward ? cell.arriving_inputs : cell.arriving_gradients;
  arriving = transfers_.receive(message(action));
}

void Run::send(const Action& action) {
  const auto key = Key(action.stage, action.microbatch);
  auto& cell = cells_[key];
  if (action.kind == Kind::send_forward) {
    transfers_.send(cell.outputs, cell.rows, message(action));
    if (!is_training_) cells_.erase(key);
    return;
  }
  transfers_.send(cell.gradients_of_inputs, cell.rows, message(action));
  cell.gradients_of_inputs.clear();
}

void Run::forward(const Action& action) {
  auto& cell = cells_[{action.stage, action.microbatch}];
  const auto index = static_cast<size_t>(action.microbatch);
  if (action.stage == 0) {
    cell.inputs = std::move(inputs_[index]);
    cell.rows = cell.inputs.front().size(0);
  } else if (!place_.has(action.stage - 1)) {
    const auto flags = cell.arriving_inputs.requires_grad();
    cell.inputs = transfers_.wait(cell.arriving_inputs);
    cell.rows = cell.arriving_inputs.rows();
    for (size_t i = 0; i < flags.size(); ++i) {
      if (flags[i] && is_training_) cell.inputs[i].set_requires_grad(true);
    }
  }
  const c10::AutoGradMode mode(is_training_);
  cell.outputs = stage(action.stage).forward(cell.inputs);
  if (!is_training_) cell.inputs.clear();
  if (is_last(action.stage)) {
    if (!targets_[index].empty() && targets_[index].front().size(0) != cell.rows) {
      throw ValueError(c10::str(
          "shardwise: Pipeline: the targets of microbatch ", index, " have ", targets_[index].front().size(0),
          " rows, its inputs ", cell.rows, ". Give as many rows of targets as of inputs."));
    }
    if (options_.loss() && (is_training_ || !targets_[index].empty())) {
      cell.loss = options_.loss()(cell.outputs, targets_[index]);
      losses_[index] = cell.loss.detach();
    }
    if (!is_training_) outputs_[index] = std::move(cell.outputs);
    cell.outputs.clear();
    return;
  }
  if (!place_.has(action.stage + 1)) return;
  auto& next = cells_[{action.stage + 1, action.microbatch}];
  next.rows = cell.rows;
  for (const auto& output : cell.outputs) {
    next.inputs.push_back(output.defined() ? output.detach().set_requires_grad(output.requires_grad()) : output);
  }
  if (!is_training_) cells_.erase({action.stage, action.microbatch});
}

bool Run::is_last_backward(const Action& action) const {
  const auto& actions = place_.actions();
  const auto last = std::find_if(actions.rbegin(), actions.rend(), [&](const Action& each) {
    return each.stage == action.stage && (each.kind == Kind::backward || each.kind == Kind::backward_weight);
  });
  return *last == action;
}

BackwardHalves Run::begin_backward(const Action& action, Cell& cell) {
  Tensors roots;
  Tensors gradients;
  if (is_last(action.stage)) {
    if (cell.loss.requires_grad()) {
      roots.push_back(cell.loss);
      gradients.push_back(at::full_like(cell.loss.detach(), weights_[static_cast<size_t>(action.microbatch)]));
    }
  } else {
    if (!place_.has(action.stage + 1)) cell.gradients_of_outputs = transfers_.wait(cell.arriving_gradients);
    for (size_t i = 0; i < cell.outputs.size(); ++i) {
      if (!cell.outputs[i].defined() || !cell.outputs[i].requires_grad()) continue;
      if (!cell.gradients_of_outputs.at(i).defined()) continue;
      roots.push_back(std::move(cell.outputs[i]));
      gradients.push_back(std::move(cell.gradients_of_outputs[i]));
    }
  }
  return {std::move(roots), std::move(gradients), stage(action.stage).gathers_for_each_half()};
}

void Run::backward(const Action& action) {
  const auto key = Key(action.stage, action.microbatch);
  auto& cell = cells_[key];
  if (!cell.halves) cell.halves = begin_backward(action, cell);
  Tensors wanted;
  for (const auto& input : cell.inputs) {
    if (action.stage > 0 && input.defined() && input.requires_grad()) wanted.push_back(input);
  }
  Tensors found(wanted.size());
  if (action.kind == Kind::backward_input) {
    found = cell.halves->input_gradients(wanted);
  } else {
    const bool is_last = is_last_backward(action);
    stage(action.stage).before_backward(is_last);
    cell.halves->accumulate_parameter_gradients();
    stage(action.stage).after_backward(is_last);
    for (size_t i = 0; i < wanted.size(); ++i) found[i] = wanted[i].grad();
  }
  if (action.kind != Kind::backward_weight && action.stage > 0) {
    size_t next = 0;
    auto& result = place_.has(action.stage - 1) ? cells_[{action.stage - 1, action.microbatch}].gradients_of_outputs
                                                : cell.gradients_of_inputs;
    for (const auto& input : cell.inputs) {
      result.push_back(input.defined() && input.requires_grad() ? found[next++] : at::Tensor());
    }
  }
  if (action.kind == Kind::backward_input) return;
  auto to_send = std::move(cell.gradients_of_inputs);
  cell = {};
  cell.gradients_of_inputs = std::move(to_send);
}

// The wait for its inputs does not count as computing.
void Run::compute(const Action& action) {
  auto& cell = cells_[{action.stage, action.microbatch}];
  auto& arriving = action.kind == Kind::forward ? cell.arriving_inputs : cell.arriving_gradients;
  transfers_.arrive(arriving);
  if (arriving.failed()) throw Error("");
  const auto begin = std::chrono::steady_clock::now();
  std::optional<observe::Span> span;
  if (observe::recording()) span.emplace("stage", text(action), place_.name);
  action.kind == Kind::forward ? forward(action) : backward(action);
  busy_ += std::chrono::steady_clock::now() - begin;
}

void Run::act(const Action& action) {
  if (is_send(action.kind)) return send(action);
  is_receive(action.kind) ? receive(action) : compute(action);
}

void Run::give_up(const Action& action) {
  if (is_send(action.kind)) {
    transfers_.send_failure(message(action));
  } else if (is_receive(action.kind)) {
    auto arriving = transfers_.receive(message(action));
    transfers_.arrive(arriving);
  }
}

std::string Run::carry_out(std::string error) {
  bool failed = !error.empty();
  for (const auto& action : place_.actions()) {
    if (failed) {
      give_up(action);
      continue;
    }
    try {
      act(action);
    } catch (const PeerError&) {
      throw;
    } catch (const std::exception& failure) {
      failed = true;
      const auto reason = base::reason(failure);
      // A rank that only received the failure of another one adds nothing.
      if (!reason.empty()) error = c10::str("rank ", place_.name, ", ", text(action), ": ", reason);
      if (is_send(action.kind)) give_up(action);
    }
  }
  // Messages for abandoned microbatches may still be on their way and use their memory.
  for (auto& [key, cell] : cells_) {
    transfers_.arrive(cell.arriving_inputs);
    transfers_.arrive(cell.arriving_gradients);
  }
  transfers_.finish();
  return error;
}

PipelineResult Run::result(bool with_outputs) {
  PipelineResult result{.busy_seconds = std::chrono::duration<double>(busy_).count()};
  for (auto& loss : losses_) {
    if (loss.defined()) result.losses.push_back(std::move(loss));
  }
  if (!with_outputs || outputs_.empty()) return result;
  for (size_t i = 0; i < outputs_.front().size(); ++i) {
    Tensors parts;
    for (const auto& outputs : outputs_) parts.push_back(outputs.at(i));
    result.outputs.push_back(at::cat(parts));
  }
  return result;
}

} // namespace shardwise::pipeline
