#include "transport/staged_backend.h"

#include "transport/error.h"

#include <c10/util/StringUtil.h>

#include <algorithm>

namespace shardwise::transport {
namespace {

using c10d::OpType;
using Tensors = Backend::Tensors;
using Copies = Staging::Copies;

Tensors all_of(const at::Tensor& tensor) {
  return {tensor};
}

Tensors all_of(const Tensors& tensors) {
  return tensors;
}

Tensors all_of(const Backend::TensorLists& lists) {
  Tensors all;
  for (const auto& list : lists) all.insert(all.end(), list.begin(), list.end());
  return all;
}

bool on_host(const at::Tensor& tensor) {
  return tensor.is_cpu();
}

template <typename Several>
bool on_host(const std::vector<Several>& all) {
  return std::all_of(all.begin(), all.end(), [](const auto& each) { return on_host(each); });
}

/// A message that came into the host's memory reaches its tensor at the end of the wait.
class ReceivedWork final : public c10d::Work {
 public:
  ReceivedWork(at::Tensor tensor, at::Tensor copy, Backend::Works on_host)
      : tensor_(std::move(tensor)),
        copy_(std::move(copy)),
        on_host_(std::move(on_host)) {}

  bool wait(std::chrono::milliseconds timeout) override {
    if (!on_host_->wait(timeout)) return false;
    land();
    return true;
  }
  bool isCompleted() override {
    if (!on_host_->isCompleted()) return false;
    if (on_host_->isSuccess()) land();
    return true;
  }
  bool isSuccess() const override {
    return on_host_->isSuccess();
  }
  std::exception_ptr exception() const override {
    return on_host_->exception();
  }
  int sourceRank() const override {
    return on_host_->sourceRank();
  }
  Tensors result() override {
    return {tensor_};
  }

 private:
  void land() {
    const std::lock_guard lock(landing_);
    if (copy_.defined()) tensor_.copy_(std::exchange(copy_, {}));
  }

  std::mutex landing_;
  const at::Tensor tensor_;
  at::Tensor copy_;
  const Backend::Works on_host_;
};

/// Receives into the tensors themselves if they are on the host, else into a copy.
template <typename Receive>
Backend::Works received(Tensors& tensors, const Receive& receive) {
  if (on_host(tensors) || tensors.size() != 1) return receive(tensors);
  const auto& tensor = tensors.front();
  Tensors copies{at::empty_like(tensor, at::TensorOptions(at::kCPU), at::MemoryFormat::Contiguous)};
  return c10::make_intrusive<ReceivedWork>(tensor, copies.front(), receive(copies));
}

} // namespace

StagedBackend::Works StagedBackend::stage(OpType type, const Tensors& reads, const Tensors& writes, Start start) {
  std::optional<c10::Device> device;
  for (const auto* tensors : {&reads, &writes}) {
    for (const auto& tensor : *tensors) {
      if (!device) device = tensor.device();
      if (tensor.device() == *device && tensor.layout() == at::kStrided) continue;
      raise_value_error(c10::str(
          "shardwise: a collective needs dense tensors that are all on the same device, and got one of ",
          tensor.layout(), " on ", tensor.device(), " beside the first, on ", *device, "."));
    }
  }
  auto& staging = [&]() -> Staging& {
    const std::lock_guard lock(mutex_);
    for (const auto& [known, one] : stagings_) {
      if (known == *device) return *one;
    }
    return *stagings_.emplace_back(*device, std::make_unique<Staging>(*device)).second;
  }();
  return staging.carry(
      type, reads, writes,
      {.wait_first = [this](std::function<void()> ready) { begin_after(std::move(ready)); },
       .start = std::move(start)});
}

template <typename Output, typename Input, typename Call>
StagedBackend::Works StagedBackend::pass(OpType type, Output& output, Input& input, const Call& call) {
  if (on_host(output) && on_host(input)) return call(output, input);
  return stage(type, all_of(input), all_of(output), [&](const Copies& copies) {
    auto out = copies.of(output);
    auto in = copies.of(input);
    return call(out, in);
  });
}

StagedBackend::Works StagedBackend::allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) {
  return pass(
      OpType::ALLREDUCE, tensors, tensors, [&](auto& own, auto& /*same*/) { return Backend::allreduce(own, options); });
}

StagedBackend::Works StagedBackend::allreduce_coalesced(
    Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) {
  return pass(OpType::ALLREDUCE_COALESCED, tensors, tensors, [&](auto& own, auto& /*same*/) {
    return Backend::allreduce_coalesced(own, options);
  });
}

StagedBackend::Works StagedBackend::_allgather_base(
    at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) {
  return pass(OpType::_ALLGATHER_BASE, output, input, [&](auto& out, auto& in) {
    return Backend::_allgather_base(out, in, options);
  });
}

StagedBackend::Works StagedBackend::allgather(
    TensorLists& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) {
  return pass(
      OpType::ALLGATHER, outputs, inputs, [&](auto& out, auto& in) { return Backend::allgather(out, in, options); });
}

StagedBackend::Works StagedBackend::allgather_into_tensor_coalesced(
    Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) {
  return pass(OpType::COALESCED, outputs, inputs, [&](auto& out, auto& in) {
    return Backend::allgather_into_tensor_coalesced(out, in, options);
  });
}

StagedBackend::Works StagedBackend::_reduce_scatter_base(
    at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& options) {
  return pass(OpType::_REDUCE_SCATTER_BASE, output, input, [&](auto& out, auto& in) {
    return Backend::_reduce_scatter_base(out, in, options);
  });
}

StagedBackend::Works StagedBackend::reduce_scatter(
    Tensors& outputs, TensorLists& inputs, const c10d::ReduceScatterOptions& options) {
  return pass(OpType::REDUCE_SCATTER, outputs, inputs, [&](auto& out, auto& in) {
    return Backend::reduce_scatter(out, in, options);
  });
}

StagedBackend::Works StagedBackend::reduce_scatter_tensor_coalesced(
    Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& options) {
  return pass(OpType::COALESCED, outputs, inputs, [&](auto& out, auto& in) {
    return Backend::reduce_scatter_tensor_coalesced(out, in, options);
  });
}

StagedBackend::Works StagedBackend::broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) {
  return pass(
      OpType::BROADCAST, tensors, tensors, [&](auto& own, auto& /*same*/) { return Backend::broadcast(own, options); });
}

// Torch leaves open what the other ranks find in their tensors.
StagedBackend::Works StagedBackend::reduce(Tensors& tensors, const c10d::ReduceOptions& options) {
  return pass(
      OpType::REDUCE, tensors, tensors, [&](auto& own, auto& /*same*/) { return Backend::reduce(own, options); });
}

StagedBackend::Works StagedBackend::gather(TensorLists& outputs, Tensors& inputs, const c10d::GatherOptions& options) {
  return pass(OpType::GATHER, outputs, inputs, [&](auto& out, auto& in) { return Backend::gather(out, in, options); });
}

StagedBackend::Works StagedBackend::scatter(
    Tensors& outputs, TensorLists& inputs, const c10d::ScatterOptions& options) {
  return pass(
      OpType::SCATTER, outputs, inputs, [&](auto& out, auto& in) { return Backend::scatter(out, in, options); });
}

StagedBackend::Works StagedBackend::alltoall_base(
    at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_sizes, std::vector<int64_t>& input_sizes,
    const c10d::AllToAllOptions& options) {
  return pass(OpType::ALLTOALL_BASE, output, input, [&](auto& out, auto& in) {
    return Backend::alltoall_base(out, in, output_sizes, input_sizes, options);
  });
}

StagedBackend::Works StagedBackend::allgather_coalesced(
    TensorLists& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) {
  return pass(OpType::ALLGATHER_COALESCED, outputs, inputs, [&](auto& out, auto& in) {
    return Backend::allgather_coalesced(out, in, options);
  });
}

StagedBackend::Works StagedBackend::send(Tensors& tensors, int to, int tag) {
  if (on_host(tensors)) return Backend::send(tensors, to, tag);
  Tensors copies;
  for (const auto& tensor : tensors) copies.push_back(tensor.cpu());
  return Backend::send(copies, to, tag);
}

StagedBackend::Works StagedBackend::recv(Tensors& tensors, int from, int tag) {
  return received(tensors, [&](Tensors& own) { return Backend::recv(own, from, tag); });
}

StagedBackend::Works StagedBackend::recvAnysource(Tensors& tensors, int tag) {
  return received(tensors, [&](Tensors& own) { return Backend::recvAnysource(own, tag); });
}

} // namespace shardwise::transport
