#pragma once

#include "device.h"

#include <ATen/core/Tensor.h>

#include <functional>
#include <vector>

namespace late {

inline bool is_late(const at::Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == c10::kPrivateUse1;
}

/// A tensor of the CPU over the same memory, for a worker of the device while an operation runs.
at::Tensor for_worker(const at::Tensor& tensor);
/// Adds the bytes of a tensor of the device, or of a pinned one.
void add_uses(const at::Tensor& tensor, bool writes, std::vector<Use>& uses);

/// Issues to the current stream of a tensor's device.
void issue(const at::Tensor& on, const char* name, const std::vector<Use>& uses, std::function<void()> run);
/// Blocks the host until the current stream of the tensor's device is done.
void synchronize(const at::Tensor& on, const char* what);

/// Another tensor of these sizes and strides on the same device.
at::Tensor empty_like_on(const at::Tensor& model, const at::Device& device);

} // namespace late
