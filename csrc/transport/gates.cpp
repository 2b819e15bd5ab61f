#include "transport/gates.h"

#include "cuda/gate.h"
#include "transport/error.h"

#include <c10/util/StringUtil.h>

#include <map>
#include <mutex>

namespace shardwise::transport {
namespace {

struct Table {
  std::mutex mutex;
  std::map<c10::DeviceType, MakeGate> gates;

  Table() {
    if (cuda::has_gates()) gates[c10::kCUDA] = &cuda::make_gate;
  }
};

Table& table() {
  static Table all;
  return all;
}

MakeGate find_gates(c10::Device device) {
  const std::lock_guard lock(table().mutex);
  const auto found = table().gates.find(device.type());
  if (found != table().gates.end()) return found->second;
  raise_value_error(c10::str(
      "shardwise: the direct transport was given ", device,
      ", and this build carries tensors on the CPU alone. For CUDA, build shardwise with nvcc against a CUDA build of "
      "torch; for other devices use a back end of theirs."));
}

} // namespace

void set_gates(c10::DeviceType device, MakeGate make) {
  const std::lock_guard lock(table().mutex);
  table().gates.insert_or_assign(device, std::move(make));
}

void require_gates(c10::Device device) {
  find_gates(device);
}

std::unique_ptr<base::Gate> make_gate(c10::Device device) {
  return find_gates(device)(device);
}

} // namespace shardwise::transport
