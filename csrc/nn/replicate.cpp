#include <shardwise/replicate.h>

#include "engine/unit.h"
#include "nn/module_walk.h"

#include <shardwise/error.h>

#include <c10/util/StringUtil.h>

#include <algorithm>
#include <mutex>
#include <unordered_map>

namespace shardwise {
namespace {

/// Which module has which unit. Owns neither; an address that was used again is told apart by the parameters.
class UnitsByModule {
 public:
  static UnitsByModule& get() {
    static auto* units = new UnitsByModule;
    return *units;
  }

  std::shared_ptr<engine::Unit> find(const torch::nn::Module& module, const nn::ModuleTensors& tensors) {
    const std::lock_guard lock(mutex_);
    const auto entry = units_.find(&module);
    const auto unit = entry == units_.end() ? nullptr : entry->second.lock();
    if (!unit) return nullptr;
    const auto& parameters = tensors.parameters;
    const bool same =
        std::any_of(parameters.begin(), parameters.end(), [&](const auto& p) { return unit->has(p.tensor); });
    return same ? unit : nullptr;
  }

  void add(const torch::nn::Module& module, const std::shared_ptr<engine::Unit>& unit) {
    const std::lock_guard lock(mutex_);
    std::erase_if(units_, [](const auto& entry) { return entry.second.expired(); });
    units_[&module] = unit;
  }

 private:
  std::mutex mutex_;
  std::unordered_map<const torch::nn::Module*, std::weak_ptr<engine::Unit>> units_;
};

void ignore(std::vector<engine::NamedTensor>& parameters, const std::vector<at::Tensor>& ignored) {
  std::erase_if(parameters, [&](const auto& parameter) {
    return std::any_of(ignored.begin(), ignored.end(), [&](const auto& t) { return t.is_same(parameter.tensor); });
  });
}

} // namespace

Unit replicate(torch::nn::Module& module, const ReplicateOptions& options) {
  auto tensors = nn::walk(module);
  if (UnitsByModule::get().find(module, tensors)) {
    throw ValueError(c10::str(
        "shardwise: replicate() was called on this ", module.name(),
        " already. Each distinct composable distributed API can only be applied to a module once."));
  }
  ignore(tensors.parameters, options.ignored_parameters());
  auto unit = engine::Unit::create(
      options.mesh() ? *options.mesh() : Mesh::shared(), std::move(tensors.parameters), tensors.buffers,
      options.broadcast());
  UnitsByModule::get().add(module, unit);
  return Unit(std::move(unit));
}

Unit unit(const torch::nn::Module& module) {
  auto found = UnitsByModule::get().find(module, nn::walk(module));
  if (!found) {
    throw ValueError(c10::str(
        "shardwise: this ", module.name(), " has no unit: replicate() was not called on it, or it has no parameters."));
  }
  return Unit(std::move(found));
}

} // namespace shardwise
