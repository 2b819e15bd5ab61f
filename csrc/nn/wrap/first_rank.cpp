#include "nn/wrap/first_rank.h"

#include "base/compute_guard.h"
#include "comm/mesh/gather_texts.h"

#include <shardwise/error.h>

#include <ATen/ops/empty.h>
#include <c10/util/StringUtil.h>

#include <sstream>

namespace shardwise::nn {

FirstRank::FirstRank(
    const torch::nn::Module& module, const ModuleState& state, const LoadStateDictOptions& options,
    const std::string& dict) {
  if (!options.broadcast_from_rank0()) return;
  const auto& meshes = state.meshes();
  if (meshes.size() > 1) {
    throw ValueError(c10::str(
        "shardwise: the units of this ", module.name(), " lie on ", meshes.size(),
        " meshes, which have no common rank 0. Give ", dict, " to every rank, with broadcast_from_rank0(false)."));
  }
  for (const auto& axis : state.axes()) {
    if (axis->ranks.size() > 1) axes_.push_back(axis);
  }
  auto* const unit = meshes.empty() ? nullptr : meshes.front().get();
  if (unit != nullptr && unit->ranks().world() > 1) unit_ = unit;
  is_here_ = state.is_first();
}

void FirstRank::share(std::vector<std::string>& texts, const std::string& what) const {
  std::string all;
  for (const auto& text : texts) all += text + '\0';
  for (const auto& axis : axes_) {
    all = comm::gather_texts(all, {axis->ranks}, axis->mesh.device(), what, axis->counters).front();
  }
  if (unit_ != nullptr) {
    const auto device = unit_->mesh().device();
    all = comm::gather_texts(all, unit_->ranks().axes(), device, what, unit_->own_counters()).front();
  }
  texts.clear();
  std::istringstream stream(all);
  for (std::string text; std::getline(stream, text, '\0');) texts.push_back(text);
}

// Sent as bytes, which every back end can do whatever the dtype.
at::Tensor FirstRank::share(
    const at::Tensor& value, at::IntArrayRef sizes, const at::TensorOptions& options, const std::string& what,
    Counters* counters) const {
  if (unit_ == nullptr && axes_.empty()) return value;
  const base::ComputeGuard guard;
  const auto there = options.device((unit_ != nullptr ? unit_->mesh() : axes_.front()->mesh).device());
  const auto whole = is_here() ? value.to(there).contiguous() : at::empty(sizes, there);
  if (whole.numel() == 0) return whole;
  const auto bytes = whole.view({-1}).view(at::kByte);
  for (const auto& axis : axes_) axis->ranks.broadcast(bytes, 0, what, axis->counters).wait();
  if (unit_ != nullptr)
    unit_->ranks().broadcast_from_first(bytes, what, counters == nullptr ? unit_->own_counters() : *counters);
  return whole;
}

} // namespace shardwise::nn
