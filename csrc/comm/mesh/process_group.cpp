#include "comm/mesh/process_group.h"

#include "base/host.h"
#include "base/reason.h"
#include "comm/mesh/device_backend.h"
#include "comm/rendezvous/call_with_timeout.h"
#include "comm/rendezvous/rendezvous.h"
#include "transport/transport.h"

#include <shardwise/error.h>

#include <c10/util/StringUtil.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <exception>

namespace shardwise::comm {
namespace {

GroupSpec part_of(const GroupSpec& spec, const char* backend) {
  auto part = spec;
  part.store = c10::make_intrusive<c10d::PrefixStore>(backend, spec.store);
  return part;
}

c10::intrusive_ptr<c10d::ProcessGroup> make(const GroupSpec& spec) {
  using Type = c10d::ProcessGroup::BackendType;
  auto group = c10::make_intrusive<c10d::ProcessGroup>(spec.store, spec.rank, spec.size);
  const bool direct = spec.transport == Transport::direct;
  const bool is_like_direct = spec.device_backend && !transport::transport_name(*spec.device_backend).empty();
  const bool takes_device = !spec.device.is_cpu() && (spec.direct_for_device || is_like_direct);
  const auto ours = direct || takes_device ? make_direct(part_of(spec, "direct")) : nullptr;
  const auto type = direct ? Type::CUSTOM : Type::GLOO;
  group->setBackend(c10::DeviceType::CPU, type, direct ? ours : make_gloo(part_of(spec, "gloo")));
  group->setDefaultBackend(type);
  // First: some back ends connect when they get their device.
  if (!spec.device.is_cpu()) group->setBoundDeviceId(spec.device);
  if (takes_device) {
    group->setBackend(spec.device.type(), Type::CUSTOM, ours);
    group->setDefaultBackend(Type::CUSTOM);
  } else if (!spec.device.is_cpu()) {
    const auto& of_device = device_backend(spec);
    const auto made = of_device.make(part_of(spec, "device"));
    group->setBackend(spec.device.type(), of_device.type, made);
    group->setDefaultBackend(of_device.type);
    // Else the first collective would connect, in the middle of a backward and within its time limit.
    if (spec.size > 1) made->eagerConnectSingleDevice(spec.device);
  }
  group->setGroupName(spec.name);
  return group;
}

/// Runs `make` on another thread, because connecting blocks and cannot be interrupted.
template <typename Make>
auto make_with_timeout(const GroupSpec& spec, const Make& make) {
  const auto look = [&] { spec.look_at(spec.processes, "could not set up"); };
  try {
    return call_with_timeout(spec.connect_timeout, look, [spec, make] { return make(spec); });
  } catch (const Error&) {
    throw;
  } catch (const std::exception& error) {
    const auto who = spec.processes.who_ended();
    const auto what = c10::str("shardwise: ", spec.me(), " could not set up the process group '", spec.name, "'");
    const auto details = ". Details: " + base::reason(error);
    if (!who.empty()) throw PeerError(c10::str(what, ", because ", who, details));
    throw PeerError(c10::str(
        what, " within ", spec.connect_timeout.count(), " ms. Check that all ", spec.size,
        " ranks are running and make the same mesh, and that they can reach each other (by host name, or by the "
        "interface in GLOO_SOCKET_IFNAME); or allow more time (MeshOptions().connect_timeout(), the timeout of "
        "init_process_group())",
        details));
  }
}

} // namespace

std::string GroupSpec::me() const {
  if (names.empty() || names[rank] == rank) return c10::str("rank ", rank, " of ", size);
  return c10::str("rank ", names[rank], " (number ", rank, " of the ", size, " of its process group)");
}

// Before store_barrier() none of them ends in order.
void GroupSpec::look_at(const Processes& of_ranks, const char* failed) const {
  if (look) look();
  const auto ended = of_ranks.ended();
  if (ended.empty()) return;
  throw PeerError(c10::str(
      "shardwise: ", me(), " ", failed, " the process group '", name, "', because ",
      of_ranks.how_it_ended(ended.front()), "."));
}

c10::intrusive_ptr<c10d::Backend> make_direct(const GroupSpec& spec) {
  return transport::make_backend(
      make_gloo(spec), {.shared_memory = spec.shared_memory,
                        .host = spec.host.empty() ? base::this_host() : spec.host,
                        .connect_timeout = spec.connect_timeout,
                        .timeout = spec.timeout,
                        .names = spec.names});
}

c10::intrusive_ptr<c10d::ProcessGroup> make_process_group(const GroupSpec& spec) {
  return make_with_timeout(spec, make);
}

// On a CPU shutdown() waits for nobody. That of NCCL waits for the collectives under way.
void end_process_group(c10d::ProcessGroup& group) {
  if (std::uncaught_exceptions() == 0 || !group.hasBackends()) return group.shutdown();
  for (const auto device : group.getDeviceTypes()) {
    const auto backend = group.getBackend(device.type());
    device.is_cpu() ? backend->shutdown() : backend->abort();
  }
}

c10::intrusive_ptr<c10d::Backend> make_transport(GroupSpec spec) {
  auto joined = make_with_timeout(
      spec, [](const GroupSpec& own) { return rendezvous(own, Processes::identity(own.name_of(own.rank))); });
  spec.store = std::move(joined.store);
  spec.processes = Processes(joined.texts);
  return make_with_timeout(spec, [](const GroupSpec& own) {
    auto backend = make_direct(own);
    store_barrier(own);
    return backend;
  });
}

std::optional<std::chrono::milliseconds> timeout_of(c10d::ProcessGroup& group) {
  for (const auto device : group.getDeviceTypes()) {
    try {
      // Torch's fake back end may have no options.
      if (const auto options = group.getBackend(device.type())->getBackendOptions()) return options->timeout;
    } catch (const c10::Error&) {
      continue; // A back end written in Python may not say.
    }
  }
  return std::nullopt;
}

} // namespace shardwise::comm
