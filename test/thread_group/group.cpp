#include "group.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/zeros.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/StringUtil.h>

namespace thread_group {
namespace {

using Tensors = std::vector<at::Tensor>;
using Parts = std::vector<Part>;

at::Tensor reduced(const Parts& parts, const c10d::ReduceOp& op, const std::function<at::Tensor(const Part&)>& of) {
  auto result = of(parts.front()).clone();
  for (size_t rank = 1; rank < parts.size(); ++rank) {
    const auto next = of(parts[rank]);
    switch (op.op_) {
      case c10d::ReduceOp::SUM:
      case c10d::ReduceOp::AVG:
        result.add_(next);
        break;
      case c10d::ReduceOp::MAX:
        result.copy_(at::maximum(result, next));
        break;
      default:
        TORCH_CHECK(false, "this reduction is not known");
    }
  }
  if (op.op_ == c10d::ReduceOp::AVG) result.div_(static_cast<int64_t>(parts.size()));
  return result;
}

const at::Tensor& first(const Part& part) {
  return part.inputs.front();
}

void check(const at::Tensor& tensor, const at::Device& device) {
  TORCH_CHECK(tensor.device() == device, "a process group of ", device, " got a tensor on ", tensor.device());
  TORCH_CHECK(tensor.is_contiguous(), "Tensors must be contiguous");
}

} // namespace

Group::Group(const std::string& name, int rank, int size, const at::Device& device, std::chrono::milliseconds timeout)
    : Backend(rank, size),
      device_(device),
      options_(c10::make_intrusive<Options>(name, timeout)) {}

Group::Kernel Group::kernel(const char* name, const at::Tensor& size, const std::string& more) {
  return {
      .name = name,
      .place = {.channel = "all", .rank = rank_, .size = size_, .number = meetings_["all"]++},
      .signature = c10::str(name, " of ", size.numel(), " ", size.scalar_type(), more)};
}

Group::Kernel Group::message(const char* name, const at::Tensor& tensor, int from, int to) {
  const auto channel = c10::str(from, ">", to);
  return {
      .name = name,
      .place = {.channel = channel, .rank = rank_ == from ? 0 : 1, .size = 2, .number = meetings_[channel]++},
      .signature = c10::str("message of ", tensor.numel(), " ", tensor.scalar_type())};
}

c10::intrusive_ptr<c10d::Work> Group::launch(Kernel kernel, bool in_current_stream, std::chrono::milliseconds timeout) {
  for (const auto& tensor : kernel.reads) check(tensor, device_);
  for (const auto& tensor : kernel.writes) check(tensor, device_);
  if (together_) {
    together_->push_back(std::move(kernel));
    return c10::make_intrusive<c10d::Work>();
  }
  std::vector<Kernel> kernels;
  kernels.push_back(std::move(kernel));
  return launch_all(std::move(kernels), in_current_stream, time_limit(timeout));
}

void Group::startCoalescing() {
  together_.emplace();
}

c10::intrusive_ptr<c10d::Work> Group::endCoalescing() {
  auto kernels = *std::exchange(together_, std::nullopt);
  if (kernels.empty()) return nullptr;
  return launch_all(std::move(kernels), false, options_->timeout);
}

c10::intrusive_ptr<c10d::Work> Group::allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) {
  auto& tensor = tensors.at(0);
  auto own = kernel("all_reduce", tensor, c10::str(", reduction ", static_cast<int>(options.reduceOp.op_)));
  own.reads = own.writes = {tensor};
  own.compute = [op = options.reduceOp](const Parts& parts) { return Tensors{reduced(parts, op, first)}; };
  return launch(std::move(own), !options.asyncOp, options.timeout);
}

c10::intrusive_ptr<c10d::Work> Group::broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) {
  auto& tensor = tensors.at(0);
  auto own = kernel("broadcast", tensor, c10::str(" from ", options.rootRank));
  if (rank_ == options.rootRank) {
    own.reads = {tensor};
  } else {
    own.writes = {tensor};
  }
  const bool is_root = rank_ == options.rootRank;
  own.compute = [root = options.rootRank, is_root](const Parts& parts) {
    return is_root ? Tensors() : Tensors{first(parts[root]).clone()};
  };
  return launch(std::move(own), !options.asyncOp, options.timeout);
}

c10::intrusive_ptr<c10d::Work> Group::_allgather_base(
    at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) {
  TORCH_CHECK(
      output.numel() == input.numel() * size_,
      "output tensor size must be equal to world_size times input tensor size");
  auto own = kernel("all_gather", input);
  own.reads = {input};
  own.writes = {output.view(-1)};
  own.compute = [](const Parts& parts) {
    Tensors all;
    for (const auto& part : parts) all.push_back(first(part).reshape(-1));
    return Tensors{at::cat(all)};
  };
  return launch(std::move(own), !options.asyncOp, options.timeout);
}

c10::intrusive_ptr<c10d::Work> Group::allgather_into_tensor_coalesced(
    Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) {
  return one_by_one(outputs.size(), [&](size_t k) { _allgather_base(outputs[k], inputs[k], options); });
}

c10::intrusive_ptr<c10d::Work> Group::_reduce_scatter_base(
    at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& options) {
  TORCH_CHECK(
      input.numel() == output.numel() * size_, "input tensor must be the same size as output size times world size");
  auto own = kernel("reduce_scatter", output, c10::str(", reduction ", static_cast<int>(options.reduceOp.op_)));
  own.reads = {input};
  own.writes = {output};
  own.compute = [op = options.reduceOp, rank = rank_, size = size_, sizes = output.sizes().vec()](const Parts& parts) {
    return Tensors{reduced(parts, op, [&](const Part& part) {
      return first(part).reshape({size, -1}).select(0, rank).reshape(sizes);
    })};
  };
  return launch(std::move(own), !options.asyncOp, options.timeout);
}

c10::intrusive_ptr<c10d::Work> Group::reduce_scatter_tensor_coalesced(
    Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& options) {
  return one_by_one(outputs.size(), [&](size_t k) { _reduce_scatter_base(outputs[k], inputs[k], options); });
}

// A sum of one number. The host waits for it, as with NCCL, though here before anybody calls wait().
c10::intrusive_ptr<c10d::Work> Group::barrier(const c10d::BarrierOptions& options) {
  const c10::DeviceGuard guard(device_);
  Tensors one{at::zeros({1}, at::TensorOptions(device_).dtype(at::kFloat))};
  c10d::AllreduceOptions sum;
  sum.timeout = options.timeout;
  auto work = allreduce(one, sum);
  work->wait(options.timeout);
  c10::impl::VirtualGuardImpl(device_.type()).getStream(device_).synchronize();
  if (const auto error = work->exception()) std::rethrow_exception(error);
  return work;
}

c10::intrusive_ptr<c10d::Work> Group::send(Tensors& tensors, int to, int /*tag*/) {
  auto own = message("send", tensors.at(0), rank_, to);
  own.reads = {tensors[0]};
  own.compute = [](const Parts& /*parts*/) { return Tensors(); };
  return launch(std::move(own), false, c10d::kUnsetTimeout);
}

c10::intrusive_ptr<c10d::Work> Group::recv(Tensors& tensors, int from, int /*tag*/) {
  auto own = message("receive", tensors.at(0), from, rank_);
  own.writes = {tensors[0]};
  own.compute = [](const Parts& parts) { return Tensors{first(parts[0]).clone()}; };
  return launch(std::move(own), false, c10d::kUnsetTimeout);
}

c10::intrusive_ptr<c10d::Work> Group::one_by_one(size_t count, const std::function<void(size_t)>& call) {
  const bool outermost = !together_;
  if (outermost) startCoalescing();
  for (size_t k = 0; k < count; ++k) call(k);
  return outermost ? endCoalescing() : c10::make_intrusive<c10d::Work>();
}

} // namespace thread_group
