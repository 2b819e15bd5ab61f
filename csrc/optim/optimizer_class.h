#pragma once

#include <shardwise/state_dict.h>

#include <torch/optim/optimizer.h>

#include <memory>
#include <string>
#include <vector>

namespace shardwise::optim {

/// The state of an optimizer for one parameter, under the names of PyTorch's state dicts. Empty if there is none, as
/// before the first step.
struct ParameterState {
  /// In the sizes of the parameter: for a shard, this rank's piece.
  StateDict tensors{"Tensor"};
  /// All else, such as `step`: tensors on the host, without dimensions.
  StateDict numbers{"Number"};

  bool is_empty() const {
    return tensors.is_empty() && numbers.is_empty();
  }
};

/// One of torch::optim's classes that compute element by element: the names and types of its state for a parameter, and
/// of the options of a group. Each function takes state or options of this class.
class OptimizerClass {
 public:
  virtual ~OptimizerClass() = default;
  /// The class that this optimizer has or is derived from. Raises ValueError for any other.
  static const OptimizerClass& of(const torch::optim::Optimizer& optimizer);

  /// For example AdamW.
  virtual std::string name() const = 0;
  /// Whether this is state of this class.
  virtual bool made(const torch::optim::OptimizerParamState& state) const = 0;
  virtual ParameterState read(const torch::optim::OptimizerParamState& state) const = 0;
  /// State with these values. Others have the values of new state.
  virtual std::unique_ptr<torch::optim::OptimizerParamState> make(const ParameterState& values) const = 0;
  /// The names of all tensors and numbers that the state of a parameter may have.
  virtual ParameterState possible() const = 0;
  /// Whether every parameter has state from the start, without which a step fails.
  virtual bool begins_with_state() const = 0;
  /// The names of the tensors in the state of every parameter that an optimizer with these options has changed.
  virtual std::vector<std::string> kept(const torch::optim::OptimizerOptions& options) const = 0;

  /// The options as tensors on the host: of doubles or of bools, with two elements for `betas`, else without
  /// dimensions.
  virtual StateDict read(const torch::optim::OptimizerOptions& options) const = 0;
  /// Sets those that are in the dict; each has as many elements as read() gives it.
  virtual void write(torch::optim::OptimizerOptions& options, const StateDict& values) const = 0;
};

/// For example "parameter 1 of group 0"; "" if the optimizer does not have it.
std::string place_of(const torch::optim::Optimizer& optimizer, const at::Tensor& parameter);

} // namespace shardwise::optim
