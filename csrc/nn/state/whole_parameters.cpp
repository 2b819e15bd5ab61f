#include <shardwise/state_dict.h>

#include "base/compute_guard.h"
#include "nn/state/module_state.h"
#include "nn/wrap/owners.h"

#include <shardwise/error.h>

#include <c10/util/StringUtil.h>

#include <set>
#include <utility>

namespace shardwise {
namespace {

/// While it lives, the members of a module and its registry have whole parameters.
class Shown {
 public:
  Shown(torch::nn::Module& module, const nn::ModuleState& state, const StateDict& values) {
    std::unordered_map<const at::TensorImpl*, at::Tensor> leaves;
    for (const auto& entry : state.entries()) {
      if (entry.copies == nullptr) continue;
      const auto& parameter = *entry.unit->parameter_of_shard(entry.tensor);
      entry.unit->lend_leaf(parameter, values[entry.names.front()]);
      leaves.emplace(entry.tensor.unsafeGetTensorImpl(), parameter.leaf());
      lent_.insert(entry.unit);
    }
    module.apply([&](torch::nn::Module& part) {
      for (auto& registered : nn::ModuleParts::of(part)) {
        const auto found = leaves.find(registered.value().unsafeGetTensorImpl());
        if (found == leaves.end()) continue;
        shards_.emplace_back(&registered.value(), std::exchange(registered.value(), found->second));
      }
    });
  }
  Shown(const Shown&) = delete;
  Shown& operator=(const Shown&) = delete;
  ~Shown() {
    for (const auto& [registered, shard] : shards_) *registered = shard;
    for (const auto& unit : lent_) unit->restore_memory();
  }

 private:
  std::set<std::shared_ptr<engine::Unit>> lent_;
  std::vector<std::pair<at::Tensor*, at::Tensor>> shards_;
};

constexpr auto kFunction = "with_whole_parameters";

std::string refuse_pieces(const nn::ModuleState& state) {
  if (state.axes().empty()) return "";
  return c10::str(
      "shardwise: rank ", state.rank(), ": ", kFunction,
      "() was called for a module that parallelize() divided, whose members hold pieces of layers. Change the values "
      "of full_state_dict(), and give them to load_full_state_dict().");
}

} // namespace

void with_whole_parameters(
    torch::nn::Module& module, const std::function<void()>& change, const LoadStateDictOptions& options) {
  nn::ModuleState state(module);
  auto error = state.locate();
  state.agree(kFunction, error.empty() ? refuse_pieces(state) : error);
  auto values = full_state_dict(module);
  std::exception_ptr failure;
  {
    const Shown shown(module, state, values);
    try {
      change();
    } catch (const std::exception& caught) {
      failure = std::current_exception();
      error = c10::str(
          "shardwise: rank ", state.rank(), ": the function of ", kFunction,
          "() failed, so nothing was changed in sharded parameters: ", caught.what());
    }
    const base::ComputeGuard guard;
    for (auto& value : values) value.value() = at::Tensor();
    const auto take = [&](const auto& tensors) {
      for (const auto& named : tensors) {
        if (auto* value = values.find(named.key())) *value = named.value().detach();
      }
    };
    take(module.named_parameters());
    take(module.named_buffers());
  }
  try {
    state.agree(kFunction, error);
  } catch (const Error&) {
    if (failure) std::rethrow_exception(failure);
    throw;
  }
  load_full_state_dict(module, values, options);
}

} // namespace shardwise
