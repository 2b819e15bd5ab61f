#pragma once

#include "engine/front_end.h"
#include "split/split_parameter.h"

#include <torch/nn/module.h>

#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
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
    /// How parallelize() divided it; null if it did not. The unit's parameter, or `tensor` without a unit, is then this
    /// rank's piece of the whole.
    std::shared_ptr<const split::SplitParameter> split = nullptr;
    /// Its unit keeps it as parameter number `index` of `copies`, which is null if this rank holds all of it.
    std::shared_ptr<engine::Unit> unit;
    group::FullCopies* copies = nullptr;
    size_t index = 0;

    /// Whether several ranks have pieces of it by parallelize().
    bool is_split() const {
      return split && split->axis->ranks.size() > 1;
    }
    /// The part of a whole that the ranks of its unit have together.
    at::Tensor piece_of(const at::Tensor& whole) const;
    /// The whole, from what the ranks of its unit have together: all ranks of parallelize()'s axis call it.
    at::Tensor whole_of(const at::Tensor& piece, std::optional<at::Device> device) const;
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
  /// The axes along which parallelize() divided parameters.
  const std::vector<std::shared_ptr<const split::SplitAxis>>& axes() const {
    return axes_;
  }
  /// Whether this rank is the first in the meshes of all units.
  bool is_first_in_units() const;
  /// Whether this rank is the first of all that hold parts of the module.
  bool is_first() const;
  /// This rank's number in the widest mesh known here, for errors.
  int64_t rank() const;

  /// Raises an Error, the same on all ranks, if `error` is not "" on some rank, or if the ranks do not all call
  /// `function` for the same tensors. All ranks must call it.
  void agree(const std::string& function, const std::string& error) const;

 private:
  void find_splits();
  /// The entry of this tensor; null if it is not of the module.
  Entry* entry_of(const at::Tensor& tensor);
  std::string describe(const std::string& function) const;

  std::vector<Entry> entries_;
  std::unordered_map<at::TensorImpl*, size_t> index_;
  std::vector<std::pair<std::string, size_t>> names_;
  std::vector<std::shared_ptr<engine::Unit>> units_;
  std::vector<std::shared_ptr<engine::Unit>> meshes_;
  std::vector<std::shared_ptr<const split::SplitAxis>> axes_;
};

} // namespace shardwise::nn
