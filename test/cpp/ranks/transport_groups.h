// Back ends of the direct transport, for ranks that are threads or processes.
#pragma once

#include "comm/mesh/process_group.h"
#include "support/ranks.h"
#include "transport/backend.h"
#include "transport/shared_memory.h"

#include <gtest/gtest.h>
#include <torch/torch.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <csignal>
#include <string>
#include <thread>

namespace shardwise::test {

using BackendPtr = c10::intrusive_ptr<c10d::Backend>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

/// Whether back ends of the direct transport go through shared memory in the running test.
inline bool& through_shared_memory() {
  static bool value = false;
  return value;
}

/// A test of the direct transport over TCP and one through shared memory, of the suites Transport and
/// TransportSameHost.
#define TRANSPORT_TEST(name)         \
  void name();                       \
  TEST(Transport, name) {            \
    through_shared_memory() = false; \
    name();                          \
  }                                  \
  TEST(TransportSameHost, name) {    \
    through_shared_memory() = true;  \
    name();                          \
  }                                  \
  void name()

/// A signal for this process, after some time.
inline void raise_later(std::chrono::milliseconds time, int signal) {
  std::thread([=] {
    std::this_thread::sleep_for(time);
    std::raise(signal);
  }).detach();
}

/// "shared memory" or "TCP".
inline std::string transport_name(const c10d::Backend& backend) {
  return dynamic_cast<const transport::Backend&>(backend).transport_name();
}

/// The same values where the ranks can read them in place.
inline at::Tensor shared(const at::Tensor& tensor) {
  return transport::shared_zeros(tensor.numel(), tensor.options()).view(tensor.sizes()).copy_(tensor);
}

/// Of all ranks of the test.
inline comm::GroupSpec spec_of(
    Rank& rank, const std::string& name, std::chrono::milliseconds timeout = std::chrono::seconds(60)) {
  return {
      .name = name,
      .store = c10::make_intrusive<c10d::PrefixStore>(name, rank.store()),
      .rank = rank.rank(),
      .size = rank.world_size(),
      .device = at::kCPU,
      .connect_timeout = std::chrono::seconds(60),
      .timeout = timeout};
}

/// All ranks make one of the same name together.
inline BackendPtr make_backend(
    Rank& rank, const std::string& name, std::chrono::milliseconds timeout = std::chrono::seconds(60)) {
  auto spec = spec_of(rank, name, timeout);
  spec.shared_memory = through_shared_memory();
  return comm::make_direct(spec);
}

/// As run_ranks(), with a back end of each rank.
inline void run_with_backends(int world, const std::function<void(Rank&, c10d::Backend&)>& fn) {
  run_ranks(world, [&](Rank& rank) { fn(rank, *make_backend(rank, "a backend")); });
}

inline WorkPtr start_all_reduce(
    c10d::Backend& backend, const at::Tensor& tensor, c10d::ReduceOp::RedOpType op = c10d::ReduceOp::SUM,
    std::chrono::milliseconds timeout = c10d::kUnsetTimeout) {
  std::vector<at::Tensor> tensors{tensor};
  c10d::AllreduceOptions options;
  options.reduceOp = op;
  options.timeout = timeout;
  return backend.allreduce(tensors, options);
}

/// Sums up the numbers of the ranks from 1 on.
inline void expect_sum(Rank& rank, c10d::Backend& backend, const at::Tensor& tensor = torch::empty({20000})) {
  tensor.fill_(rank.rank() + 1);
  start_all_reduce(backend, tensor)->wait();
  const auto world = rank.world_size();
  EXPECT_TRUE((tensor == world * (world + 1) / 2).all().item<bool>()) << rank.name();
}

inline WorkPtr start_all_gather(c10d::Backend& backend, at::Tensor output, at::Tensor input) {
  return backend._allgather_base(output, input, {});
}

inline WorkPtr start_reduce_scatter(
    c10d::Backend& backend, at::Tensor output, at::Tensor input, c10d::ReduceOp::RedOpType op = c10d::ReduceOp::SUM) {
  c10d::ReduceScatterOptions options;
  options.reduceOp = op;
  return backend._reduce_scatter_base(output, input, options);
}

} // namespace shardwise::test
