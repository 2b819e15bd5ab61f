#pragma once

#include <ATen/autocast_mode.h>
#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>

#include <array>
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

/// The settings of this thread's autocast, for every kind of device.
class AutocastState {
 public:
  static AutocastState now() {
    AutocastState state;
    for (size_t i = 0; i < state.devices_.size(); ++i) {
      const auto type = at::autocast::_AUTOCAST_SUPPORTED_DEVICES[i];
      state.devices_[i] = {at::autocast::is_autocast_enabled(type), at::autocast::get_autocast_dtype(type)};
    }
    state.cache_ = at::autocast::is_autocast_cache_enabled();
    return state;
  }
  static AutocastState now(const AutocastState&) {
    return now();
  }
  /// The same without the cache of casts, which would carry casts of parameters from one run of a function into
  /// another.
  AutocastState without_cache() const {
    AutocastState state = *this;
    state.cache_ = false;
    return state;
  }
  void restore() const {
    for (size_t i = 0; i < devices_.size(); ++i) {
      const auto type = at::autocast::_AUTOCAST_SUPPORTED_DEVICES[i];
      at::autocast::set_autocast_enabled(type, devices_[i].enabled);
      at::autocast::set_autocast_dtype(type, devices_[i].dtype);
    }
    at::autocast::set_autocast_cache_enabled(cache_);
  }

 private:
  struct Device {
    bool enabled;
    at::ScalarType dtype;
  };
  std::array<Device, at::autocast::_AUTOCAST_SUPPORTED_DEVICES.size()> devices_{};
  bool cache_ = false;
};

/// While it lives, this thread goes on from the given state; afterwards it goes on where it was.
template <typename State>
class StateGuard {
 public:
  explicit StateGuard(const State& state) : before_(State::now(state)) {
    state.restore();
  }
  ~StateGuard() {
    before_.restore();
  }
  StateGuard(const StateGuard&) = delete;
  StateGuard& operator=(const StateGuard&) = delete;

 private:
  State before_;
};

} // namespace shardwise::nn
