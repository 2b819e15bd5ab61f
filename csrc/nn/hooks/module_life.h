#pragma once

#include <c10/core/TensorImpl.h>
#include <torch/nn/module.h>

#include <memory>
#include <vector>

namespace shardwise::nn {

/// Tells whether the module at an address is still the one that was there. Keeps no module alive.
///
/// For a module that a shared_ptr owns this is its own weak_ptr. In any other module, the empty weak_ptr of
/// shared_from_this() is given an expired owner of ours, whose deleter holds a token: the token lives until the module
/// dies, or until a shared_ptr takes the module over. shared_from_this() throws as before.
class ModuleLife {
 public:
  explicit ModuleLife(torch::nn::Module& module);

  bool alive() const {
    return !life_.expired();
  }
  /// Expires with the module. What lock() returns keeps the module alive if a shared_ptr owns it.
  std::weak_ptr<const void> pointer() const {
    return life_;
  }
  /// For a life that ended: goes on with the module at the same address, if a shared_ptr took that over since. It
  /// counts as the same module if it still has the parameters and children that it had.
  bool continue_in(torch::nn::Module& module);
  /// Whether it has ended and can never go on.
  bool over() const;

 private:
  using Child = std::weak_ptr<torch::nn::Module>;
  using Parameter = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;
  bool has_parts() const {
    return !children_.empty() || !parameters_.empty();
  }

  std::weak_ptr<const void> life_;
  std::vector<Child> children_;
  std::vector<Parameter> parameters_;
};

} // namespace shardwise::nn
