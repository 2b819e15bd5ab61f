#include "transport/transport.h"

#include "base/on_host.h"
#include "transport/same_host/exchange.h"
#include "transport/staged_backend.h"
#include "transport/tcp/exchange.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>

#include <random>

namespace shardwise::transport {
namespace {

/// A random number chosen by the first rank, to tell this group from others.
uint64_t common_word(c10d::Backend& gloo, std::chrono::milliseconds timeout) {
  std::random_device random;
  auto mine = at::full({1}, static_cast<int64_t>((uint64_t{random()} << 32U) | random()), base::on_host(at::kLong));
  auto all = at::empty({gloo.getSize()}, base::on_host(at::kLong));
  c10d::AllgatherOptions options;
  options.timeout = timeout;
  gloo._allgather_base(all, mine, options)->wait();
  return static_cast<uint64_t>(all.data_ptr<int64_t>()[0]);
}

} // namespace

c10::intrusive_ptr<c10d::Backend> make_backend(c10::intrusive_ptr<c10d::Backend> gloo, BackendOptions options) {
  const auto [group, hosts] =
      same_host::HostGroup::meet(*gloo, options.shared_memory, options.host, options.connect_timeout);
  const auto make = [&group = group, &hosts = hosts](Carrier& carrier) -> std::unique_ptr<Exchange> {
    if (group) return std::make_unique<same_host::SameHostExchange>(carrier.progress(), group);
    return std::make_unique<tcp::TcpExchange>(carrier, hosts);
  };
  const auto word = common_word(*gloo, options.connect_timeout);
  return c10::make_intrusive<StagedBackend>(
      std::move(gloo), options.timeout, make,
      Backend::Traits{.way = group ? "shared memory" : "TCP", .group = word, .names = std::move(options.names)});
}

std::string way_of(const c10d::Backend& backend) {
  const auto* ours = dynamic_cast<const Backend*>(&backend);
  return ours == nullptr ? "" : ours->way();
}

} // namespace shardwise::transport
