#include "comm/process_group.h"

#include "comm/direct_backend.h"
#include "comm/reason.h"

#include <shardwise/error.h>

#include <c10/util/StringUtil.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

namespace shardwise::comm {

c10::intrusive_ptr<c10d::Backend> make_direct(const GroupSpec& spec) {
  return c10::make_intrusive<direct::DirectBackend>(make_gloo(spec), spec.timeout);
}

c10::intrusive_ptr<c10d::ProcessGroup> make_process_group(const GroupSpec& spec) {
  using Type = c10d::ProcessGroup::BackendType;
  const auto backend_spec = [&](const char* backend) {
    auto result = spec;
    result.store = c10::make_intrusive<c10d::PrefixStore>(backend, spec.store);
    return result;
  };
  auto group = c10::make_intrusive<c10d::ProcessGroup>(spec.store, spec.rank, spec.size);
  try {
    const bool direct = spec.transport == Transport::direct;
    const auto type = direct ? Type::CUSTOM : Type::GLOO;
    group->setBackend(
        c10::DeviceType::CPU, type, direct ? make_direct(backend_spec("direct")) : make_gloo(backend_spec("gloo")));
    group->setDefaultBackend(type);
    if (spec.device.is_cuda()) {
      group->setBackend(c10::DeviceType::CUDA, Type::NCCL, make_nccl(backend_spec("nccl")));
      group->setDefaultBackend(Type::NCCL);
      group->setBoundDeviceId(spec.device);
    }
  } catch (const Error&) {
    throw;
  } catch (const std::exception& error) {
    throw PeerError(c10::str(
        "shardwise: rank ", spec.rank, " of ", spec.size, " could not set up the process group '", spec.name,
        "' within ", spec.connect_timeout.count(), " ms. Check that all ", spec.size,
        " ranks are running and make the same mesh, or give more time with MeshOptions().connect_timeout(). "
        "The reason given: ",
        reason(error)));
  }
  group->setGroupName(spec.name);
  return group;
}

} // namespace shardwise::comm
