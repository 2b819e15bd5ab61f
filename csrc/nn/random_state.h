#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>

#include <utility>
#include <vector>

namespace shardwise::nn {

/// Where the default generators stand: that of the CPU, and that of the current CUDA device where this process uses
/// one. Other threads that draw from them are not kept out.
class RandomState {
 public:
  static RandomState now();
  void restore() const;

 private:
  std::vector<std::pair<at::Generator, at::Tensor>> states_;
};

/// Random numbers as they followed the given state; at its end the generators go on where they were.
class RandomStateGuard {
 public:
  explicit RandomStateGuard(const RandomState& state) : before_(RandomState::now()) {
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
