#pragma once

#include "engine/front_end.h"

#include <torch/nn/module.h>

#include <string>
#include <unordered_set>
#include <vector>

namespace shardwise::nn {

/// The way to a module's registered parameters, which are protected.
struct ModuleParts : torch::nn::Module {
  static torch::OrderedDict<std::string, at::Tensor>& of(torch::nn::Module& module) {
    return module.*(&ModuleParts::parameters_);
  }
  static const torch::OrderedDict<std::string, at::Tensor>& of(const torch::nn::Module& module) {
    return module.*(&ModuleParts::parameters_);
  }
};

template <typename Module, typename Visit>
void for_each_module(Module& module, const Visit& visit) {
  visit(module);
  for (const auto& child : module.named_children()) for_each_module(static_cast<Module&>(*child.value()), visit);
}

/// Marks the parameters that these modules do not compute with by a member of theirs, and which therefore stay whole:
/// those of `whole`, which the user named; what ParameterList and ParameterDict have, and classes made from them; and
/// what is left in a registry of torch's own modules when their member was assigned to.
///
/// Any other class keeps its members to itself. A parameter of one is taken to be a member's, unless nothing at all
/// but registries and this list holds it: `unheld` then, for the ranks to agree upon. Returns those taken to be.
std::unordered_set<const at::TensorImpl*> find_owners(
    const std::vector<const torch::nn::Module*>& modules, const std::vector<at::Tensor>& whole,
    std::vector<engine::NamedTensor>& parameters);

} // namespace shardwise::nn
