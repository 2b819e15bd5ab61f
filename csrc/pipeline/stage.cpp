#include "pipeline/stage.h"

#include "engine/front_end.h"

#include <shardwise/error.h>

#include <c10/util/StringUtil.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <map>

namespace shardwise::pipeline {
namespace {

/// The outermost units of a module's parameters.
std::vector<std::shared_ptr<engine::Unit>> outermost_units(const torch::nn::Module& module) {
  std::vector<std::shared_ptr<engine::Unit>> found;
  for (const auto& parameter : module.parameters()) {
    auto unit = parameter.defined() ? engine::Unit::of(parameter) : nullptr;
    while (unit && unit->outer()) unit = unit->outer();
    if (unit && std::find(found.begin(), found.end(), unit) == found.end()) found.push_back(std::move(unit));
  }
  return found;
}

} // namespace

Stage::Stage(int number, PipelineStage given, bool gather_once)
    : number_(number),
      given_(std::move(given)),
      gather_once_(gather_once) {
  if (!given_.forward) {
    throw ValueError(c10::str(
        "shardwise: Pipeline: stage ", number,
        " has no function. Give a PipelineStage with a forward, or the holder of a module."));
  }
  if (!given_.module) return;
  outermost_ = outermost_units(*given_.module);
  for (const auto& unit : outermost_) {
    units_.emplace_back(unit);
    if (!gather_once) continue;
    units_.back().set_reshard_after_forward(false);
    units_.back().set_reshard_after_backward(false);
  }
}

void Stage::before_backward(bool is_last) {
  for (auto& unit : units_) {
    unit.set_requires_gradient_sync(is_last);
    if (gather_once_) unit.set_reshard_after_backward(is_last);
  }
}

// A half on inputs of the next step may come before the next call above.
void Stage::after_backward(bool is_last) {
  if (!is_last || !gather_once_) return;
  for (auto& unit : units_) unit.set_reshard_after_backward(false);
}

void Stage::reset() {
  for (auto& unit : units_) {
    unit.reset_iter_state();
    unit.set_requires_gradient_sync(true);
    if (gather_once_) unit.set_reshard_after_backward(false);
  }
}

void expect_units_apart(const std::vector<Stage>& stages) {
  std::map<std::shared_ptr<engine::Unit>, int> owner;
  for (const auto& stage : stages) {
    for (const auto& unit : stage.outermost()) {
      const auto [known, is_new] = owner.emplace(unit, stage.number());
      if (is_new) continue;
      throw ValueError(c10::str(
          "shardwise: Pipeline: stages ", known->second, " and ", stage.number(), " are in one unit, '", unit->name(),
          "', which could not tell their last backwards apart. Wrap the module of each stage by itself."));
    }
  }
}

} // namespace shardwise::pipeline
