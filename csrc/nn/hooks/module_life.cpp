#include "nn/hooks/module_life.h"

#include <algorithm>

namespace shardwise::nn {
namespace {

bool same_owner(const std::weak_ptr<torch::nn::Module>& a, const std::weak_ptr<torch::nn::Module>& b) {
  return !a.owner_before(b) && !b.owner_before(a);
}

} // namespace

ModuleLife::ModuleLife(torch::nn::Module& module) {
  const auto owner = module.weak_from_this();
  if (!owner.expired()) {
    life_ = owner;
    return;
  }
  const auto token = std::make_shared<const char>();
  const std::shared_ptr<torch::nn::Module> ended_owner(&module, [token](torch::nn::Module*) {});
  life_ = token;
  for (const auto& child : module.named_children()) children_.emplace_back(child.value());
  for (const auto& parameter : module.named_parameters(/*recurse=*/false)) {
    if (parameter.value().defined()) parameters_.emplace_back(parameter.value().getIntrusivePtr());
  }
}

bool ModuleLife::continue_in(torch::nn::Module& module) {
  const auto owner = module.weak_from_this();
  if (owner.expired() || !has_parts()) return false;
  // Compared without locking the weak pointers: whoever locks one may be left with the last reference.
  const auto children = module.named_children();
  const auto parameters = module.named_parameters(/*recurse=*/false);
  const bool same = std::all_of(
                        children_.begin(), children_.end(),
                        [&](const Child& child) {
                          return std::any_of(children.begin(), children.end(), [&](const auto& now) {
                            return same_owner(child, now.value());
                          });
                        }) &&
                    std::all_of(parameters_.begin(), parameters_.end(), [&](const Parameter& parameter) {
                      return std::any_of(parameters.begin(), parameters.end(), [&](const auto& now) {
                        return parameter._unsafe_get_target() == now.value().unsafeGetTensorImpl();
                      });
                    });
  if (!same) return false;
  life_ = owner;
  children_.clear();
  parameters_.clear();
  return true;
}

bool ModuleLife::over() const {
  if (alive()) return false;
  return !has_parts() ||
         std::any_of(children_.begin(), children_.end(), [](const Child& child) { return child.expired(); }) ||
         std::any_of(
             parameters_.begin(), parameters_.end(), [](const Parameter& parameter) { return parameter.expired(); });
}

} // namespace shardwise::nn
