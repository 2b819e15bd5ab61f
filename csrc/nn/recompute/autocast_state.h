#pragma once

#include <ATen/autocast_mode.h>

#include <array>

namespace shardwise::nn {

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

class AutocastGuard {
 public:
  explicit AutocastGuard(const AutocastState& state) : before_(AutocastState::now()) {
    state.restore();
  }
  ~AutocastGuard() {
    before_.restore();
  }
  AutocastGuard(const AutocastGuard&) = delete;
  AutocastGuard& operator=(const AutocastGuard&) = delete;

 private:
  AutocastState before_;
};

} // namespace shardwise::nn
