// Collectives that the direct transport leaves to Gloo. They keep their place in the order of all collectives.
#include "transport/backend.h"
#include "transport/error.h"

#include <c10/util/StringUtil.h>

namespace shardwise::transport {
namespace {

using c10d::OpType;

void require_user_tag(int tag) {
  if (tag >= 0 && tag < kFirstTag) return;
  raise_value_error(c10::str(
      "shardwise: the tag of a send or receive is ", tag, "; it must be from 0 to ", kFirstTag - 1,
      ", because larger ones are reserved for the transport."));
}

Signature signature_of(Kind kind, const at::Tensor& tensor, int64_t root) {
  return {.kind = kind, .dtype = tensor.scalar_type(), .elements = tensor.numel(), .root = root};
}

const at::Tensor& only(const std::vector<at::Tensor>& tensors, const char* collective) {
  if (tensors.size() != 1) {
    raise_value_error(c10::str("shardwise: ", collective, " needs one tensor per rank, and got ", tensors.size(), "."));
  }
  return tensors.front();
}

} // namespace

Backend::Works Backend::hand_over(OpType type, const char* title, const Tensors& seen, const Call& call, Start start) {
  return issue(type, title, seen, [call, start = std::move(start)](Exchange& exchange, Carrier& carrier) -> Outcome {
    exchange.announce(call);
    const auto work = start(carrier.gloo());
    carrier.wait(*work);
    return {.value = work->getFuture()->value(), .tensors = work->result()};
  });
}

Backend::Works Backend::broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) {
  const auto signature = signature_of(Kind::broadcast, only(tensors, "broadcast"), options.rootRank);
  return hand_over(
      OpType::BROADCAST, "shardwise:broadcast", tensors, {signature, time(options.timeout)},
      [=](auto& gloo) mutable { return gloo.broadcast(tensors, options); });
}

Backend::Works Backend::reduce(Tensors& tensors, const c10d::ReduceOptions& options) {
  auto signature = signature_of(Kind::reduce, only(tensors, "reduce"), options.rootRank);
  signature.op = options.reduceOp;
  return hand_over(
      OpType::REDUCE, "shardwise:reduce", tensors, {signature, time(options.timeout)},
      [=](auto& gloo) mutable { return gloo.reduce(tensors, options); });
}

Backend::Works Backend::gather(TensorLists& outputs, Tensors& inputs, const c10d::GatherOptions& options) {
  const auto signature = signature_of(Kind::gather, only(inputs, "gather"), options.rootRank);
  return hand_over(
      OpType::GATHER, "shardwise:gather", inputs, {signature, time(options.timeout)},
      [=](auto& gloo) mutable { return gloo.gather(outputs, inputs, options); });
}

Backend::Works Backend::scatter(Tensors& outputs, TensorLists& inputs, const c10d::ScatterOptions& options) {
  const auto signature = signature_of(Kind::scatter, only(outputs, "scatter"), options.rootRank);
  return hand_over(
      OpType::SCATTER, "shardwise:scatter", outputs, {signature, time(options.timeout)},
      [=](auto& gloo) mutable { return gloo.scatter(outputs, inputs, options); });
}

// Ranks may differ in what they send to whom, so sizes are not compared.
Backend::Works Backend::alltoall_base(
    at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_sizes, std::vector<int64_t>& input_sizes,
    const c10d::AllToAllOptions& options) {
  const Signature signature{.kind = Kind::all_to_all, .dtype = input.scalar_type()};
  return hand_over(
      OpType::ALLTOALL_BASE, "shardwise:all_to_all", {input}, {signature, time(options.timeout)},
      [=](auto& gloo) mutable { return gloo.alltoall_base(output, input, output_sizes, input_sizes, options); });
}

Backend::Works Backend::allgather_coalesced(
    TensorLists& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) {
  return hand_over(
      OpType::ALLGATHER_COALESCED, "shardwise:all_gather", inputs, {{.kind = Kind::all_gather}, time(options.timeout)},
      [=](auto& gloo) mutable { return gloo.allgather_coalesced(outputs, inputs, options); });
}

Backend::Works Backend::allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& options) {
  return hand_over(
      OpType::_ALLREDUCE_SPARSE, "shardwise:sparse_all_reduce", tensors,
      {{.kind = Kind::all_reduce, .op = options.reduceOp}, time(options.timeout)},
      [=](auto& gloo) mutable { return gloo.allreduce_sparse(tensors, options); });
}

// Its purpose is to find the rank that does not come, so it must not wait for all ranks first.
void Backend::monitoredBarrier(const c10d::BarrierOptions& options, bool wait_all_ranks) {
  issue(OpType::BARRIER, "shardwise:monitored_barrier", {}, [=](Exchange& /*exchange*/, Carrier& carrier) -> Outcome {
    carrier.gloo().monitoredBarrier(options, wait_all_ranks);
    return {};
  })->wait();
}

Backend::Works Backend::send(Tensors& tensors, int to, int tag) {
  require_user_tag(tag);
  return worker_.gloo()->send(tensors, to, tag);
}

Backend::Works Backend::recv(Tensors& tensors, int from, int tag) {
  require_user_tag(tag);
  return worker_.gloo()->recv(tensors, from, tag);
}

Backend::Works Backend::recvAnysource(Tensors& tensors, int tag) {
  require_user_tag(tag);
  return worker_.gloo()->recvAnysource(tensors, tag);
}

} // namespace shardwise::transport
