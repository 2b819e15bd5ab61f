#pragma once

#include "engine/front_end.h"

#include <torch/nn/module.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace shardwise::nn {

/// The parameters and buffers of a module as a state dict has them, and the ranks that hold them.
class ModuleState {
 public:
  /// A tensor of the module.
  struct Entry {
    /// All its names, in the order of the state dict.
    std::vector<std::string> names;
    at::Tensor tensor;
    bool is_parameter = false;
    /// The sizes of the whole tensor; those of `tensor` if this rank holds all of it.
    std::vector<int64_t> sizes;
    /// Its unit keeps it as parameter number `index` of `copies`, which is null if this rank holds all of it.
    std::shared_ptr<engine::Unit> unit;
    group::FullCopies* copies = nullptr;
    size_t index = 0;
  };

  explicit ModuleState(const torch::nn::Module& module);

  /// Finds where the units keep their parameters, after any cast or load, and makes the device wait for the step of an
  /// optimizer that set_post_optim_event() tells of. Returns what is wrong on this rank, for agree(); "" if nothing is.
  std::string locate();

  /// Each tensor once, in the order of its first name.
  const std::vector<Entry>& entries() const {
    return entries_;
  }
  /// Every name, with the index of its entry.
  const std::vector<std::pair<std::string, size_t>>& names() const {
    return names_;
  }
  /// The units that have parameters of the module, in the order in which they appear.
  const std::vector<std::shared_ptr<engine::Unit>>& units() const {
    return units_;
  }
  /// One outermost unit for each set of ranks.
  const std::vector<std::shared_ptr<engine::Unit>>& meshes() const {
    return meshes_;
  }

  /// Raises an Error, the same on all ranks, if `error` is not "" on some rank, or if the ranks do not all call
  /// `function` for the same tensors. All ranks must call it.
  void agree(const std::string& function, const std::string& error) const;

 private:
  std::string describe(const std::string& function) const;

  std::vector<Entry> entries_;
  std::vector<std::pair<std::string, size_t>> names_;
  std::vector<std::shared_ptr<engine::Unit>> units_;
  std::vector<std::shared_ptr<engine::Unit>> meshes_;
};

} // namespace shardwise::nn
