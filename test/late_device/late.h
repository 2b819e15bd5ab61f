#pragma once

#include <c10/core/Device.h>
#include <torch/library.h>

namespace late {

/// Makes the device of torch's private back end one that is late: at::Device(at::kPrivateUse1, k), called "late". Once
/// for a process, before it uses any device.
void install();

/// What install() registers, by file.
void register_guard();
void register_hooks();
void register_allocator();
void register_operations(torch::Library& library);
void register_copies(torch::Library& library);
void register_recurrent(torch::Library& library);
void register_fallback();

} // namespace late
