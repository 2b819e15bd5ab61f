#pragma once

#include "base/gate.h"

#include <shardwise/export.h>

#include <c10/core/Device.h>

#include <functional>
#include <memory>

namespace shardwise::transport {

/// Makes the gates of a kind of device. For CUDA there are some from the start, if this build has kernels for it.
/// Others are for whoever has another device.
using MakeGate = std::function<std::unique_ptr<base::Gate>(c10::Device)>;
SHARDWISE_API void set_gates(c10::DeviceType device, MakeGate make);
/// Both raise c10::ValueError if there are none.
void require_gates(c10::Device device);
std::unique_ptr<base::Gate> make_gate(c10::Device device);

} // namespace shardwise::transport
