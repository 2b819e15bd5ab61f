#include "comm/process_group.h"

#include "comm/direct_backend.h"
#include "comm/direct_wire_exchange.h"
#include "comm/reason.h"
#include "comm/same_host_exchange.h"

#include <shardwise/error.h>

#include <c10/util/StringUtil.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

namespace shardwise::comm {

c10::intrusive_ptr<c10d::Backend> make_direct(const GroupSpec& spec) {
  auto gloo = make_gloo(spec);
  const auto host = spec.host.empty() ? same_host::Members::this_host() : spec.host;
  const auto [members, hosts] = same_host::Members::meet(*gloo, spec.shared_memory, host, spec.connect_timeout);
  const auto make = [&members = members, &hosts = hosts](direct::Wire& wire) -> std::unique_ptr<direct::Exchange> {
    if (members) return std::make_unique<same_host::SameHostExchange>(wire, members);
    return std::make_unique<direct::WireExchange>(wire, hosts);
  };
  return c10::make_intrusive<direct::DirectBackend>(
      std::move(gloo), spec.timeout, make, members ? "shared memory" : "TCP");
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

std::optional<std::chrono::milliseconds> timeout_of(c10d::ProcessGroup& group, at::Device device) {
  try {
    // Torch's fake one may have none.
    const auto options = group.getBackend(device.type())->getBackendOptions();
    if (!options) return std::nullopt;
    return options->timeout;
  } catch (const c10::Error&) {
    return std::nullopt;
  }
}

} // namespace shardwise::comm
