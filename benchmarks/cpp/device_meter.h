#pragma once

#include "meters.h"

#include <shardwise/shardwise.h>

#include <ATen/DeviceAccelerator.h>

/// What tensors take on a device: counted by the allocator before torch's on the CPU, by torch's own elsewhere.
class DeviceMeter {
 public:
  explicit DeviceMeter(at::Device device) : device_(device) {
    if (!device_.is_cpu()) return;
    meters_watch_memory();
    shardwise::set_shared_memory_listener(&meters_add_memory);
  }
  int64_t bytes() const {
    return device_.is_cpu() ? meters_bytes() : allocated().current;
  }
  int64_t peak_bytes() const {
    return device_.is_cpu() ? meters_peak_bytes() : allocated().peak;
  }
  void forget_peak() const {
    device_.is_cpu() ? meters_forget_peak() : at::accelerator::resetPeakStats(device_.index());
  }
  /// Waits until the device has done what it was given.
  void synchronize() const {
    if (!device_.is_cpu()) at::accelerator::synchronizeDevice(device_.index());
  }

 private:
  c10::CachingAllocator::Stat allocated() const {
    const auto all = static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE);
    return at::accelerator::getDeviceStats(device_.index()).allocated_bytes[all];
  }
  at::Device device_;
};
