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

} // namespace

const at::Tensor& Backend::only(const Tensors& tensors, const char* collective) {
  if (tensors.size() == 1) return tensors.front();
  raise_value_error(c10::str("shardwise: ", collective, " needs one tensor per rank, and got ", tensors.size(), "."));
}

Backend::WorkPtr Backend::run_on_gloo(
    OpType type, const char* title, const Tensors& seen, const Call& call, Start start) {
  return issue(type, title, seen, [call, start = std::move(start)](Exchange& exchange, Carrier& carrier) -> Outcome {
    exchange.announce(call);
    const auto work = start(carrier.gloo());
    carrier.wait(*work);
    return {.value = work->getFuture()->value(), .tensors = work->result()};
  });
}

Backend::WorkPtr Backend::broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) {
  return pass(OpType::BROADCAST, tensors, [&](Tensors& own) {
    const auto call =
        call_of(Kind::broadcast, only(own, "broadcast"), options.timeout, c10d::ReduceOp::UNUSED, options.rootRank);
    return run_on_gloo(OpType::BROADCAST, "shardwise:broadcast", own, call, [=](auto& gloo) mutable {
      return gloo.broadcast(own, options);
    });
  });
}

// Torch leaves open what the other ranks find in their tensors.
Backend::WorkPtr Backend::reduce(Tensors& tensors, const c10d::ReduceOptions& options) {
  return pass(OpType::REDUCE, tensors, [&](Tensors& own) {
    const auto call = call_of(Kind::reduce, only(own, "reduce"), options.timeout, options.reduceOp, options.rootRank);
    return run_on_gloo(
        OpType::REDUCE, "shardwise:reduce", own, call, [=](auto& gloo) mutable { return gloo.reduce(own, options); });
  });
}

Backend::WorkPtr Backend::gather(TensorLists& outputs, Tensors& inputs, const c10d::GatherOptions& options) {
  return pass(OpType::GATHER, outputs, inputs, [&](TensorLists& out, Tensors& in) {
    const auto call =
        call_of(Kind::gather, only(in, "gather"), options.timeout, c10d::ReduceOp::UNUSED, options.rootRank);
    return run_on_gloo(OpType::GATHER, "shardwise:gather", in, call, [=](auto& gloo) mutable {
      return gloo.gather(out, in, options);
    });
  });
}

Backend::WorkPtr Backend::scatter(Tensors& outputs, TensorLists& inputs, const c10d::ScatterOptions& options) {
  return pass(OpType::SCATTER, outputs, inputs, [&](Tensors& out, TensorLists& in) {
    const auto call =
        call_of(Kind::scatter, only(out, "scatter"), options.timeout, c10d::ReduceOp::UNUSED, options.rootRank);
    return run_on_gloo(OpType::SCATTER, "shardwise:scatter", out, call, [=](auto& gloo) mutable {
      return gloo.scatter(out, in, options);
    });
  });
}

// Ranks may differ in what they send to whom, so sizes are not compared.
Backend::WorkPtr Backend::alltoall_base(
    at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_sizes, std::vector<int64_t>& input_sizes,
    const c10d::AllToAllOptions& options) {
  return pass(OpType::ALLTOALL_BASE, output, input, [&](at::Tensor& out, at::Tensor& in) {
    const Signature signature{.kind = Kind::all_to_all, .dtype = in.scalar_type()};
    return run_on_gloo(
        OpType::ALLTOALL_BASE, "shardwise:all_to_all", {in}, {signature, time(options.timeout)},
        [=](auto& gloo) mutable { return gloo.alltoall_base(out, in, output_sizes, input_sizes, options); });
  });
}

Backend::WorkPtr Backend::allgather_coalesced(
    TensorLists& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) {
  return pass(OpType::ALLGATHER_COALESCED, outputs, inputs, [&](TensorLists& out, Tensors& in) {
    return run_on_gloo(
        OpType::ALLGATHER_COALESCED, "shardwise:all_gather", in, {{.kind = Kind::all_gather}, time(options.timeout)},
        [=](auto& gloo) mutable { return gloo.allgather_coalesced(out, in, options); });
  });
}

Backend::WorkPtr Backend::allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& options) {
  return run_on_gloo(
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

Backend::WorkPtr Backend::send(Tensors& tensors, int to, int tag) {
  require_user_tag(tag);
  Tensors copies;
  for (const auto& tensor : tensors) copies.push_back(tensor.cpu());
  return worker_.gloo()->send(copies, to, tag);
}

Backend::WorkPtr Backend::recv(Tensors& tensors, int from, int tag) {
  require_user_tag(tag);
  return received(tensors, [&](Tensors& own) { return worker_.gloo()->recv(own, from, tag); });
}

Backend::WorkPtr Backend::recvAnysource(Tensors& tensors, int tag) {
  require_user_tag(tag);
  return received(tensors, [&](Tensors& own) { return worker_.gloo()->recvAnysource(own, tag); });
}

} // namespace shardwise::transport
