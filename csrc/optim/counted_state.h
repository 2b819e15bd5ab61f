#pragma once

#include "base/compute_guard.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/full.h>
#include <torch/optim/optimizer.h>

#include <memory>

namespace shardwise::optim {

/// State whose count of steps is also on a device, which may skip a step without telling the host, or make more of them
/// in replays of a graph.
class StepCount {
 public:
  virtual ~StepCount() = default;
  /// Makes step() what the device has counted. Waits for the device if it may have counted others.
  virtual void sync_from_device() = 0;
};

/// A class of state of torch::optim, with the count of steps as the fused operations need it: a tensor beside the
/// parameter. The number in step() decides: if it is not the last known value of the tensor, the tensor is made anew.
/// Copies have no tensor, so each optimizer counts by itself.
template <typename State>
class CountedState final : public State, public StepCount {
 public:
  CountedState() = default;
  explicit CountedState(const State& plain) : State(plain) {}

  /// The count before a step, on a device.
  const at::Tensor& count_on(at::Device device) {
    const auto steps = std::as_const(*this).step();
    if (!count_.defined() || count_.device() != device || steps != known_) {
      const base::ComputeGuard guard;
      count_ = at::full({}, static_cast<double>(steps), at::TensorOptions(device).dtype(at::kFloat));
      known_ = steps;
      may_differ_ = false;
    }
    return count_;
  }
  /// A step was made, which the device may skip, or which a graph captured.
  void counted(bool may_skip, bool is_captured) {
    this->step(++known_);
    may_differ_ = may_differ_ || may_skip;
    is_captured_ = is_captured_ || is_captured;
  }

  void sync_from_device() override {
    if (!(may_differ_ || is_captured_) || std::as_const(*this).step() != known_) return;
    const base::ComputeGuard guard;
    known_ = static_cast<int64_t>(count_.template item<float>());
    this->step(known_);
    may_differ_ = false;
  }

  std::unique_ptr<torch::optim::OptimizerParamState> clone() const override {
    return std::make_unique<State>(synced());
  }
  void serialize(torch::serialize::InputArchive& archive) override {
    State::serialize(archive);
  }
  void serialize(torch::serialize::OutputArchive& archive) const override {
    synced().serialize(archive);
  }

 private:
  /// The same as torch's own, with the right number.
  State synced() const {
    auto copy = *this;
    copy.sync_from_device();
    return static_cast<const State&>(copy); // NOLINT(cppcoreguidelines-slicing): what torch keeps, and no more
  }

  at::Tensor count_;
  /// The number that count_ had when it was last known.
  int64_t known_ = 0;
  bool may_differ_ = false;
  /// Whether a graph counts too, whenever it is replayed.
  bool is_captured_ = false;
};

} // namespace shardwise::optim
