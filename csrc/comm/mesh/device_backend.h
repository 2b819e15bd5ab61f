#pragma once

#include "comm/mesh/process_group.h"

#include <shardwise/detail/export.h>

#include <functional>

namespace shardwise::comm {

/// What carries the tensors of a kind of device in the process groups of a mesh.
struct DeviceBackend {
  c10d::ProcessGroup::BackendType type;
  std::function<c10::intrusive_ptr<c10d::Backend>(const GroupSpec&)> make;
};

/// For CUDA this is NCCL from the start, if this build has it. A program with another device sets its own.
SHARDWISE_API void set_device_backend(c10::DeviceType device, DeviceBackend backend);
bool has_device_backend(c10::DeviceType device);
/// Raises Error if there is none.
const DeviceBackend& device_backend(const GroupSpec& spec);
/// What a process group has for tensors of such a device; null if nothing, as one that is written in Python may.
c10::intrusive_ptr<c10d::Backend> backend_of(c10d::ProcessGroup& group, c10::DeviceType device);
/// Whether a wait for a work on tensors of such a device makes the device's stream wait, and not the host. Only the
/// back end knows: NCCL may be told to block the host, and Gloo always does.
SHARDWISE_API bool waits_in_stream(c10d::ProcessGroup& group, c10::DeviceType device);

} // namespace shardwise::comm
