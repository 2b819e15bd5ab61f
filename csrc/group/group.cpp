#include "group/group.h"

#include <c10/util/StringUtil.h>

#include <algorithm>
#include <iterator>

namespace shardwise::group {
namespace {

Kind kind_of(const Parameter* parameter) {
  const auto seen = parameter->stored();
  const bool extended = parameter->extension() != nullptr;
  return {seen.scalar_type(), seen.device(), parameter->whole, extended, parameter->full_dtype, parameter->grad_dtype};
}

} // namespace

Group::Group(std::vector<Parameter*> parameters, const Setting& setting)
    : parameters_(std::move(parameters)),
      options_(parameters_.front()->stored().options().requires_grad(false)),
      pin_(setting.pin),
      outline_(kind_of(parameters_.front()), setting.policy) {
  for (auto* parameter : parameters_) {
    sizes_.push_back(parameter->full().sizes().vec());
    parameter->sum_in(outline_.sum_dtype);
  }
  if (outline_.layout == Layout::replicate) return;
  if (parameters_.front()->extension()) {
    extended_copies_.emplace(parameters_, outline_.world, setting.full_device.value_or(options_.device()));
  } else {
    const bool apart = setting.full_device && !on_meta();
    const auto shards = apart ? options_.device(at::kCPU).pinned_memory(setting.pin) : options_;
    const auto full = (apart ? options_.device(*setting.full_device) : options_).dtype(outline_.full_dtype);
    full_copies_.emplace(
        parameters_,
        FullCopies::Setting{
            .layout = lay_out(),
            .is_flat = outline_.layout == Layout::flat,
            .rank = setting.rank,
            .kinds = {shards, full},
            .takes_memory = setting.takes_memory,
            .before = copies_before(setting)},
        *setting.front_end);
  }
}

const FullCopies* Group::copies_before(const Setting& setting) const {
  if (setting.before == nullptr) return nullptr;
  for (const auto& group : *setting.before) {
    if (group->parameters_ == parameters_) return group->full_copies();
  }
  return nullptr;
}

layout::Shards Group::lay_out() const {
  std::vector<std::vector<int64_t>> shapes;
  std::vector<int64_t> dims;
  for (const auto* parameter : parameters_) {
    shapes.push_back(parameter->full().sizes().vec());
    dims.push_back(parameter->shard_dim);
  }
  return outline_.lay_out(shapes, dims);
}

layout::Shards Group::lay_out_some(const std::vector<Parameter*>& parameters) const {
  std::vector<size_t> chosen;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    if (std::find(parameters.begin(), parameters.end(), parameters_[i]) != parameters.end()) chosen.push_back(i);
  }
  return outline_.lay_out_some(lay_out(), chosen);
}

std::vector<std::unique_ptr<Group>> Group::make(
    const std::vector<std::unique_ptr<Parameter>>& parameters, const Setting& setting) {
  std::vector<Parameter*> all;
  for (const auto& parameter : parameters) all.push_back(parameter.get());
  std::vector<std::unique_ptr<Group>> groups;
  for (auto& part : by_kind(all, kind_of)) {
    groups.push_back(std::make_unique<Group>(std::move(part), setting));
    groups.back()->follow_requires_grad();
  }
  return groups;
}

bool Group::fits() const {
  if (extended_copies_) return extended_copies_->fits();
  if (full_copies_) return full_copies_->fits();
  for (size_t i = 0; i < parameters_.size(); ++i) {
    if (!parameters_[i]->whole) return false;
    const auto& full = parameters_[i]->live_full();
    if (full.dtype() != options_.dtype() || full.device() != options_.device() || full.sizes() != sizes_[i]) {
      return false;
    }
  }
  return true;
}

// Called at every touch. In the usual case, with nothing frozen, it makes no list.
bool Group::follows_requires_grad() const {
  if (!gradients_ || gradients_->parameters().size() != parameters_.size()) return false;
  return std::all_of(parameters_.begin(), parameters_.end(), [&](const auto* parameter) {
    return parameter->requires_grad() && parameter->leaf_requires_grad();
  });
}

std::vector<Parameter*> Group::summed() const {
  std::vector<Parameter*> summed;
  std::copy_if(parameters_.begin(), parameters_.end(), std::back_inserter(summed), [](const auto* parameter) {
    return parameter->requires_grad() || parameter->owed || parameter->partial.values.defined();
  });
  return summed;
}

void Group::follow_requires_grad(const std::function<void()>& finish_sums) {
  if (follows_requires_grad()) return;
  const auto has_those = [&](const auto& summed) {
    return gradients_ ? summed == gradients_->parameters() : summed.empty();
  };
  // finish_sums() may leave some parameters owed, so summed() is called again after it.
  for (auto* parameter : parameters_) parameter->agree_on_requires_grad();
  if (gradients_ && finish_sums && !has_those(summed())) finish_sums();
  for (auto* parameter : parameters_) {
    const bool is_trained = parameter->requires_grad();
    if (!is_trained && !parameter->owed) parameter->forget_backward();
  }
  auto parameters = summed();
  if (has_those(parameters)) return;
  gradients_.reset();
  // The gradients that they show are views of the sum that was dropped.
  for (const auto* parameter : parameters_) {
    if (parameter->visible_parameter()) parameter->visible_parameter()->release();
  }
  if (!parameters.empty()) {
    auto layout = lay_out_some(parameters);
    gradients_.emplace(std::move(parameters), std::move(layout), outline_.sum_dtype, pin_);
  }
}

Plan::Group Group::plan(const Step& step) const {
  const auto name = [](at::ScalarType type) { return std::string(c10::getDtypeNames(type).first); };
  const auto own = options_.dtype().toScalarType();
  Plan::Group plan;
  plan.dtype = plan.compute_dtype = name(own);
  plan.reduce_dtype = name(outline_.sum_dtype);
  plan.device = options_.device().str();
  const bool whole = step.replicates || outline_.layout == Layout::replicate;
  plan.layout = whole ? "replicated" : outline_.layout == Layout::flat ? "flat" : "rows";
  plan.parameters = static_cast<int64_t>(parameters_.size());
  const auto item = static_cast<int64_t>(options_.dtype().itemsize());
  for (const auto* parameter : parameters_) plan.elements += parameter->full().numel();
  plan.bytes = plan.shard_bytes = plan.elements * item;
  if (full_copies_) {
    const auto sizes = full_copies_->sizes();
    plan.compute_dtype = name(sizes.dtype);
    plan.shard_bytes = sizes.part;
    plan.padding_bytes = sizes.padding;
    plan.full_bytes = sizes.full;
    if (outline_.world > 1) {
      plan.forward_gathers = {1, sizes.sent};
      // Each rank sends its larger part, its share of what `backward_ranks` ranks hold together.
      if (step.gathers_in_backward) plan.backward_gathers = {1, sizes.sent * (outline_.world / step.backward_ranks)};
    }
  }
  if (extended_copies_) {
    plan.layout = "extended";
    plan.shard_bytes = plan.bytes / outline_.world;
    const auto sent = extended_copies_->sent_bytes();
    plan.full_bytes = sent * outline_.world;
    if (outline_.world > 1) {
      plan.forward_gathers = {1, sent};
      if (step.gathers_in_backward) plan.backward_gathers = {1, sent};
    }
  }
  if (!gradients_) return plan;
  plan.bucket_bytes = gradients_->bucket_bytes();
  if (!step.sums) return plan;
  const Plan::Traffic sum{1, gradients_->sum_bytes()};
  if (outline_.world > 1) {
    plan.reduce_scatters = {1, plan.bucket_bytes};
  } else if (step.shards > 1) {
    plan.all_reduces += sum;
  }
  if (step.copies > 1 && step.sums_copies) plan.all_reduces += sum;
  return plan;
}

} // namespace shardwise::group
