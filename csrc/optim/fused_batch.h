#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/GradMode.h>
#include <torch/optim/optimizer.h>

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace shardwise::optim {

/// What GradScaler gives to a step; both may be undefined.
struct GradientScale {
  at::Tensor scale;
  /// Only if the host does not know it.
  at::Tensor found_inf;

  /// What of it a step needs; nullopt if the host already knows that it must skip the step.
  std::optional<GradientScale> decided() const;
  /// The same on a device. The host waits only if that is the host.
  GradientScale on(at::Device device) const;
  std::optional<at::Tensor> optional_scale() const {
    return scale.defined() ? std::optional(scale) : std::nullopt;
  }
  std::optional<at::Tensor> optional_found_inf() const {
    return found_inf.defined() ? std::optional(found_inf) : std::nullopt;
  }
};

/// Parameters of a group that a fused operation takes in one call, since they have the same dtype and device.
struct FusedBatch {
  size_t group;
  at::Device device;
  at::ScalarType dtype;
  std::vector<at::Tensor> parameters = {};
  std::vector<at::Tensor> gradients = {};
  /// The parameters' own gradients. Those above are copies if a gradient does not lie in memory as its parameter does.
  std::vector<at::Tensor> originals = {};

  void add(const at::Tensor& parameter, const at::Tensor& gradient, const at::Tensor& original);
  /// Gradients that were divided by their scale are then the program's too.
  void copy_back(const GradientScale& scale) const;
};

/// The parameters of an optimizer as batches, and their state.
class FusedBatches {
 public:
  /// `name`: the optimizer's class, for errors.
  FusedBatches(torch::optim::Optimizer& optimizer, std::string name) : optimizer_(optimizer), name_(std::move(name)) {}

  /// All parameters that have a gradient, each once. Raises ValueError for what no fused operation takes.
  std::vector<FusedBatch> all() const;
  /// A tensor of the state of a parameter, converted to the dtype, device and memory layout of the parameter; zeros if
  /// there is none. Raises Error for other sizes.
  at::Tensor fitting(const at::Tensor& kept, const at::Tensor& parameter) const;
  /// The state of that parameter as a `State`: torch's own state is taken over, and made if there is none. Raises Error
  /// for state of another class than `Plain`.
  template <typename State, typename Plain>
  State& state(const at::Tensor& parameter) const {
    auto& state = optimizer_.state()[parameter.unsafeGetTensorImpl()];
    if (auto* known = dynamic_cast<State*>(state.get())) return *known;
    const auto* plain = dynamic_cast<const Plain*>(state.get());
    if (state && plain == nullptr) refuse_state(parameter);
    auto made = plain == nullptr ? std::make_unique<State>() : std::make_unique<State>(*plain);
    auto& result = *made;
    state = std::move(made);
    return result;
  }

 private:
  std::string describe(const at::Tensor& parameter) const;
  void check(const at::Tensor& parameter, const at::Tensor& gradient) const;
  [[noreturn]] void refuse_state(const at::Tensor& parameter) const;

  torch::optim::Optimizer& optimizer_;
  std::string name_;
};

/// The loss that a closure computes, with gradients; undefined if there is none.
inline at::Tensor loss_of(const torch::optim::Optimizer::LossClosure& closure) {
  const c10::AutoGradMode with_grad(true);
  return closure ? closure() : at::Tensor();
}

} // namespace shardwise::optim
