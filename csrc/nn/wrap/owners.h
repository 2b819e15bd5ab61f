#pragma once

#include "engine/front_end.h"

#include <torch/nn/module.h>

#include <string>
#include <unordered_set>
#include <vector>

namespace shardwise::nn {

/// Gives access to a module's registered parameters, a protected member.
struct ModuleParts : torch::nn::Module {
  static torch::OrderedDict<std::string, at::Tensor>& of(torch::nn::Module& module) {
    return module.*(&ModuleParts::parameters_);
  }
  static const torch::OrderedDict<std::string, at::Tensor>& of(const torch::nn::Module& module) {
    return module.*(&ModuleParts::parameters_);
  }
};

/// Marks the parameters that no member of these modules holds, and which therefore stay whole: those in `whole`, which
/// the user named; those of ParameterList, ParameterDict and classes made from them; and those left in the registry of
/// one of torch's own modules whose member was assigned to.
///
/// The members of other classes are unknown. A parameter of such a class counts as held by a member. If only registries
/// and this list refer to it, it is marked `unheld`, for the ranks to agree upon. Returns the parameters of such
/// classes.
std::unordered_set<const at::TensorImpl*> find_owners(
    const std::vector<const torch::nn::Module*>& modules, const std::vector<at::Tensor>& whole,
    std::vector<engine::NamedTensor>& parameters);

} // namespace shardwise::nn
