#include "nn/wrap/owners.h"

#include "nn/wrap/module_walk.h"

#include <torch/nn.h>

#include <set>
#include <typeinfo>
#include <unordered_map>

namespace shardwise::nn {
namespace {

/// The tensors that members of torch's own modules hold.
class Members {
 public:
  /// Adds the members of a module. Returns whether its class is one of torch's itself, which has no other members.
  bool add(const torch::nn::Module& module) {
    using namespace torch::nn;
    return of<LinearImpl>(module, &LinearImpl::weight, &LinearImpl::bias) ||
           of<BilinearImpl>(module, &BilinearImpl::weight, &BilinearImpl::bias) ||
           of<EmbeddingImpl>(module, &EmbeddingImpl::weight) ||
           of<EmbeddingBagImpl>(module, &EmbeddingBagImpl::weight) ||
           of<LayerNormImpl>(module, &LayerNormImpl::weight, &LayerNormImpl::bias) ||
           of<GroupNormImpl>(module, &GroupNormImpl::weight, &GroupNormImpl::bias) ||
           of<PReLUImpl>(module, &PReLUImpl::weight) || of_pair<Conv1dImpl>(module) || of_pair<Conv2dImpl>(module) ||
           of_pair<Conv3dImpl>(module) || of_pair<ConvTranspose1dImpl>(module) ||
           of_pair<ConvTranspose2dImpl>(module) || of_pair<ConvTranspose3dImpl>(module) ||
           of_pair<BatchNorm1dImpl>(module) || of_pair<BatchNorm2dImpl>(module) || of_pair<BatchNorm3dImpl>(module) ||
           of_pair<InstanceNorm1dImpl>(module) || of_pair<InstanceNorm2dImpl>(module) ||
           of_pair<InstanceNorm3dImpl>(module) || of_cell<RNNCellImpl>(module) || of_cell<LSTMCellImpl>(module) ||
           of_cell<GRUCellImpl>(module) || of_recurrent<RNNImpl>(module) || of_recurrent<LSTMImpl>(module) ||
           of_recurrent<GRUImpl>(module) ||
           of<MultiheadAttentionImpl>(
               module, &MultiheadAttentionImpl::in_proj_weight, &MultiheadAttentionImpl::in_proj_bias,
               &MultiheadAttentionImpl::q_proj_weight, &MultiheadAttentionImpl::k_proj_weight,
               &MultiheadAttentionImpl::v_proj_weight, &MultiheadAttentionImpl::bias_k,
               &MultiheadAttentionImpl::bias_v);
  }
  bool contains(const at::Tensor& tensor) const {
    return held_.contains(tensor.unsafeGetTensorImpl());
  }

 private:
  template <typename Module, typename... Members>
  bool of(const torch::nn::Module& module, Members... members) {
    const auto* known = module.as<Module>();
    if (known == nullptr) return false;
    (held_.insert((known->*members).unsafeGetTensorImpl()), ...);
    return typeid(module) == typeid(Module);
  }
  template <typename Module>
  bool of_pair(const torch::nn::Module& module) {
    return of<Module>(module, &Module::weight, &Module::bias);
  }
  template <typename Module>
  bool of_cell(const torch::nn::Module& module) {
    return of<Module>(module, &Module::weight_ih, &Module::weight_hh, &Module::bias_ih, &Module::bias_hh);
  }
  template <typename Module>
  bool of_recurrent(const torch::nn::Module& module) {
    const auto* known = module.as<Module>();
    if (known == nullptr) return false;
    for (const auto& weight : known->all_weights()) held_.insert(weight.unsafeGetTensorImpl());
    return typeid(module) == typeid(Module);
  }

  std::unordered_set<const at::TensorImpl*> held_;
};

/// The registry entries that have a parameter.
struct Registered {
  std::set<const at::Tensor*> entries;
  /// One is in a container that hands out what is in its registry.
  bool handed_out = false;
  /// All are in modules of torch's own classes.
  bool known = true;
};

} // namespace

std::unordered_set<const at::TensorImpl*> find_owners(
    const std::vector<const torch::nn::Module*>& modules, const std::vector<at::Tensor>& whole,
    std::vector<engine::NamedTensor>& parameters) {
  Members members;
  std::unordered_map<const at::TensorImpl*, Registered> registered;
  for (const auto* module : modules) {
    module->apply([&](const torch::nn::Module& part) {
      const bool hands_out =
          part.as<torch::nn::ParameterListImpl>() != nullptr || part.as<torch::nn::ParameterDictImpl>() != nullptr;
      const bool known = members.add(part);
      for (const auto& entry : ModuleParts::of(part)) {
        if (!entry.value().defined()) continue;
        auto& found = registered[entry.value().unsafeGetTensorImpl()];
        found.entries.insert(&entry.value());
        found.handed_out = found.handed_out || hands_out;
        found.known = found.known && known;
      }
    });
  }
  std::unordered_set<const at::TensorImpl*> taken_for_members;
  for (auto& parameter : parameters) {
    const auto& found = registered[parameter.tensor.unsafeGetTensorImpl()];
    const bool by_member = members.contains(parameter.tensor);
    parameter.whole = is_among(whole, parameter.tensor) || found.handed_out || (found.known && !by_member);
    // A proof in one direction only: if something else holds it, that need not be a member.
    const bool is_open = !parameter.whole && !by_member;
    parameter.unheld = is_open && parameter.tensor.use_count() <= found.entries.size() + 1;
    if (is_open) taken_for_members.insert(parameter.tensor.unsafeGetTensorImpl());
  }
  return taken_for_members;
}

} // namespace shardwise::nn
