#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>

#include <utility>
#include <vector>

namespace shardwise::nn {

/// The states of the default generators: that of the CPU, those of the devices of some tensors, and that of the current
/// device if this process uses one. Does not keep other threads from drawing meanwhile.
class RandomState {
 public:
  static RandomState now(at::TensorList tensors);
  /// Of the same generators as another one.
  static RandomState now(const RandomState& other);
  void restore() const;

 private:
  void add(at::Generator generator);

  std::vector<std::pair<at::Generator, at::Tensor>> states_;
};

/// While it lives, random numbers go on from the given state; afterwards the generators go on where they were.
class RandomStateGuard {
 public:
  explicit RandomStateGuard(const RandomState& state) : before_(RandomState::now(state)) {
    state.restore();
  }
  ~RandomStateGuard() {
    before_.restore();
  }
  RandomStateGuard(const RandomStateGuard&) = delete;
  RandomStateGuard& operator=(const RandomStateGuard&) = delete;

 private:
  RandomState before_;
};

} // namespace shardwise::nn
