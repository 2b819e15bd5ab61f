#include "nn/wrap/first_rank.h"

#include "base/compute_guard.h"
#include "comm/mesh/gather_texts.h"

#include <ATen/ops/empty.h>

namespace shardwise::nn {
namespace {

/// A list of texts as one, and back.
std::string packed(const std::vector<std::string>& texts) {
  std::string all;
  for (const auto& text : texts) all += text + '\0';
  return all;
}

std::vector<std::string> unpacked(const std::string& all) {
  std::vector<std::string> texts;
  for (size_t start = 0; start < all.size();) {
    const auto end = all.find('\0', start);
    texts.push_back(all.substr(start, end - start));
    start = end + 1;
  }
  return texts;
}

} // namespace

FirstRank::FirstRank(const ModuleState& module, bool each_has_all) {
  if (each_has_all) return;
  for (const auto& axis : module.axes()) {
    if (axis->ranks.size() > 1) axes_.push_back(axis);
  }
  auto* const unit = module.meshes().empty() ? nullptr : module.meshes().front().get();
  if (unit != nullptr && unit->ranks().world() > 1) unit_ = unit;
  is_here_ = module.is_first();
}

void FirstRank::share(std::vector<std::string>& texts, const std::string& what) const {
  auto all = packed(texts);
  for (const auto& axis : axes_) {
    all = comm::gather_texts(all, {axis->ranks}, axis->mesh.device(), what, axis->counters).front();
  }
  if (unit_ != nullptr) {
    const auto device = unit_->mesh().device();
    all = comm::gather_texts(all, unit_->ranks().axes(), device, what, unit_->own_counters()).front();
  }
  texts = unpacked(all);
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
