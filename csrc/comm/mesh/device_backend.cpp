#include "comm/mesh/device_backend.h"

#include "kernels/cuda_library.h"
#include "transport/transport.h"

#include <shardwise/error.h>

#include <c10/util/StringUtil.h>
#include <torch/csrc/distributed/c10d/Utils.hpp>

#include <algorithm>
#include <map>
#include <mutex>

namespace shardwise::comm {
namespace {

struct Table {
  std::mutex mutex;
  std::map<c10::DeviceType, DeviceBackend> backends;
};

Table& table() {
  static Table all;
  return all;
}

/// Null if there is none.
const DeviceBackend* find(c10::DeviceType device) {
  const std::lock_guard lock(table().mutex);
  auto& backends = table().backends;
  const auto* cuda = device == c10::kCUDA ? kernels::cuda_library() : nullptr;
  if (cuda != nullptr && !backends.contains(device)) {
    const auto make = [cuda](const GroupSpec& spec) { return cuda->make_nccl(spec); };
    backends[device] = {c10d::ProcessGroup::BackendType::NCCL, make};
  }
  const auto found = backends.find(device);
  return found == backends.end() ? nullptr : &found->second;
}

} // namespace

void set_device_backend(c10::DeviceType device, DeviceBackend backend) {
  const std::lock_guard lock(table().mutex);
  table().backends.insert_or_assign(device, std::move(backend));
}

bool has_device_backend(c10::DeviceType device) {
  return find(device) != nullptr;
}

const DeviceBackend& device_backend(const GroupSpec& spec) {
  if (const auto* found = find(spec.device.type())) return *found;
  throw Error(c10::str(
      "shardwise: the process group '", spec.name, "' is on ", spec.device,
      ", and there is no back end for its tensors. For CUDA that is NCCL: torch is a CPU build, this program does not "
      "link libtorch_cuda, or shardwise was built without CUDA. Install and link a CUDA build of torch, and build "
      "shardwise with SHARDWISE_CUDA=on."));
}

c10::intrusive_ptr<c10d::Backend> backend_of(c10d::ProcessGroup& group, c10::DeviceType device) {
  if (!group.hasBackends()) return nullptr;
  const auto types = group.getDeviceTypes();
  return std::find(types.begin(), types.end(), device) == types.end() ? nullptr : group.getBackend(device);
}

bool waits_in_stream(c10d::ProcessGroup& group, c10::DeviceType device) {
  if (device == c10::kCPU) return false;
  const auto backend = backend_of(group, device);
  if (!backend) return true;
  if (backend->getBackendName() == "gloo" || !transport::transport_name(*backend).empty()) return false;
  // Asked for each collective. NCCL reads it once too, when a group is made.
  static const bool nccl_blocks = c10d::getCvarBool({"TORCH_NCCL_BLOCKING_WAIT", "NCCL_BLOCKING_WAIT"}, false);
  return device != c10::kCUDA || !nccl_blocks;
}

} // namespace shardwise::comm
