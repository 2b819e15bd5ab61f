// Back ends of both transports, for ranks that are threads or processes.
#pragma once

#include "comm/process_group.h"
#include "support/rank.h"

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <string>

namespace shardwise::test {

using BackendPtr = c10::intrusive_ptr<c10d::Backend>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

/// All ranks make one of the same name together.
inline BackendPtr make_backend(
    Rank& rank, const std::string& name, Transport transport = Transport::direct,
    std::chrono::milliseconds timeout = std::chrono::seconds(60)) {
  const comm::GroupSpec spec{
      .name = name,
      .store = c10::make_intrusive<c10d::PrefixStore>(name, rank.store()),
      .rank = rank.rank(),
      .size = rank.world_size(),
      .device = at::kCPU,
      .connect_timeout = std::chrono::seconds(60),
      .timeout = timeout};
  return transport == Transport::direct ? comm::make_direct(spec) : comm::make_gloo(spec);
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
