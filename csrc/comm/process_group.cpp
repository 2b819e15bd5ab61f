#include "comm/process_group.h"

#include "comm/direct_backend.h"
#include "comm/direct_wire_exchange.h"
#include "comm/patience.h"
#include "comm/reason.h"
#include "comm/rendezvous.h"
#include "comm/same_host_exchange.h"

#include <shardwise/error.h>

#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <c10/util/StringUtil.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <random>

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
  const auto type = direct ? Type::CUSTOM : Type::GLOO;
  group->setBackend(
      c10::DeviceType::CPU, type, direct ? make_direct(part_of(spec, "direct")) : make_gloo(part_of(spec, "gloo")));
  group->setDefaultBackend(type);
  if (spec.device.is_cuda()) {
    group->setBackend(c10::DeviceType::CUDA, Type::NCCL, make_nccl(part_of(spec, "nccl")));
    group->setDefaultBackend(Type::NCCL);
    group->setBoundDeviceId(spec.device);
  }
  group->setGroupName(spec.name);
  return group;
}

/// A number of the first rank's, that no other group has.
uint64_t common_word(c10d::Backend& gloo, std::chrono::milliseconds timeout) {
  std::random_device random;
  auto mine = at::full({1}, static_cast<int64_t>((uint64_t{random()} << 32U) | random()), at::kLong);
  auto all = at::empty({gloo.getSize()}, at::kLong);
  c10d::AllgatherOptions options;
  options.timeout = timeout;
  gloo._allgather_base(all, mine, options)->wait();
  return static_cast<uint64_t>(all.data_ptr<int64_t>()[0]);
}

/// Its connections block, and nobody can end that.
template <typename Make>
auto with_patience(const GroupSpec& spec, const Make& make) {
  const auto look = [&] {
    const auto ended = spec.processes.ended();
    if (ended.empty()) return;
    throw PeerError(c10::str(
        "shardwise: ", spec.me(), " could not set up the process group '", spec.name, "', for ",
        spec.processes.how_it_ended(ended.front()), " (look for its own error first)."));
  };
  try {
    return patiently(spec.connect_timeout, look, [spec, make] { return make(spec); });
  } catch (const Error&) {
    throw;
  } catch (const std::exception& error) {
    const auto who = spec.processes.who_ended();
    throw PeerError(c10::str(
        "shardwise: ", spec.me(), " could not set up the process group '", spec.name, "' within ",
        spec.connect_timeout.count(), " ms. Check that all ", spec.size,
        " ranks are running and make the same mesh, that they reach each other (at the address of their host's name, "
        "or of the interface that GLOO_SOCKET_IFNAME names), or give more time (MeshOptions().connect_timeout(), the "
        "timeout of init_process_group()). ",
        who, who.empty() ? "" : ". ", "The reason given: ", reason(error)));
  }
}

} // namespace

std::string GroupSpec::me() const {
  if (names.empty() || names[rank] == rank) return c10::str("rank ", rank, " of ", size);
  return c10::str("rank ", names[rank], " (number ", rank, " of the ", size, " of its process group)");
}

c10::intrusive_ptr<c10d::Backend> make_direct(const GroupSpec& spec) {
  auto gloo = make_gloo(spec);
  const auto host = spec.host.empty() ? same_host::Members::this_host() : spec.host;
  const auto [members, hosts] = same_host::Members::meet(*gloo, spec.shared_memory, host, spec.connect_timeout);
  const auto make = [&members = members, &hosts = hosts](direct::Wire& wire) -> std::unique_ptr<direct::Exchange> {
    if (members) return std::make_unique<same_host::SameHostExchange>(wire, members);
    return std::make_unique<direct::WireExchange>(wire, hosts);
  };
  const auto word = common_word(*gloo, spec.connect_timeout);
  return c10::make_intrusive<direct::DirectBackend>(
      std::move(gloo), spec.timeout, make,
      direct::DirectBackend::Traits{.way = members ? "shared memory" : "TCP", .group = word, .names = spec.names});
}

c10::intrusive_ptr<c10d::ProcessGroup> make_process_group(const GroupSpec& spec) {
  return with_patience(spec, make);
}

c10::intrusive_ptr<c10d::Backend> make_transport(GroupSpec spec) {
  auto roll = with_patience(
      spec, [](const GroupSpec& own) { return call_the_roll(own, Processes::card(own.name_of(own.rank))); });
  spec.store = std::move(roll.store);
  spec.processes = Processes(roll.texts);
  return with_patience(spec, [](const GroupSpec& own) {
    auto backend = make_direct(own);
    meet(own);
    return backend;
  });
}

std::optional<std::chrono::milliseconds> timeout_of(c10d::ProcessGroup& group) {
  for (const auto device : group.getDeviceTypes()) {
    try {
      // Torch's fake one may have none.
      if (const auto options = group.getBackend(device.type())->getBackendOptions()) return options->timeout;
    } catch (const c10::Error&) {
      continue; // Written in another language: it does not say.
    }
  }
  return std::nullopt;
}

} // namespace shardwise::comm
