#include "nn/wrap/later_parameters.h"

#include "engine/front_end.h"
#include "nn/hooks/hook_table.h"
#include "nn/wrap/module_walk.h"
#include "nn/wrap/owners.h"

#include <shardwise/error.h>

#include <c10/util/StringUtil.h>

#include <algorithm>
#include <utility>

namespace shardwise::nn {
namespace {

// Made for every forward and backward. apply() copies no list of modules.
uint64_t fingerprint(const torch::nn::Module& module) {
  uint64_t sum = 0;
  module.apply([&](const torch::nn::Module& part) {
    for (const auto& parameter : ModuleParts::of(part)) {
      const auto& tensor = parameter.value();
      sum = sum * 31 + reinterpret_cast<uintptr_t>(tensor.unsafeGetTensorImpl());
      sum = sum * 31 + (tensor.defined() && tensor.requires_grad() ? 1 : 0);
    }
  });
  return sum;
}

} // namespace

LaterParameters::LaterParameters(const std::vector<torch::nn::Module*>& modules, std::string function)
    : function_(std::move(function)) {
  for (auto* module : modules) {
    wrapped_.push_back({module, HookTable::get().life(*module)});
    for (const auto& parameter : walk(*module).parameters) {
      if (!engine::Unit::of(parameter.tensor)) left_out_.emplace_back(parameter.tensor.getIntrusivePtr());
    }
  }
}

void LaterParameters::refuse(int64_t rank) {
  for (auto& [module, life, known] : wrapped_) {
    if (life.expired()) continue;
    const auto now = fingerprint(*module);
    if (now == known) continue;
    for_each_tensor(*module, [&](const std::string& name, const at::Tensor& tensor, bool is_parameter) {
      const auto is_same = [&](const Parameter& other) {
        return other._unsafe_get_target() == tensor.unsafeGetTensorImpl();
      };
      if (!is_parameter || !tensor.requires_grad() || engine::Unit::of(tensor)) return;
      if (std::any_of(left_out_.begin(), left_out_.end(), is_same)) return;
      throw Error(c10::str(
          "shardwise: rank ", rank, ": the parameter '", name, "' was registered after ", function_,
          "(), so nobody averages its gradient and each rank would train it alone. Register all modules and parameters "
          "before wrapping, or give the new module to replicate() or fully_shard() too."));
    });
    known = now;
  }
}

} // namespace shardwise::nn
