#include "transport/staging.h"

#include "kernels/cuda_library.h"
#include "transport/error.h"

#include <ATen/ops/empty_like.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>

#include <memory>
#include <mutex>

namespace shardwise::transport {
namespace {

c10::impl::VirtualGuardImpl guard_of(c10::Device device) {
  return c10::impl::VirtualGuardImpl(device.type());
}

/// Laid out like the tensor.
at::Tensor pinned_like(const at::Tensor& tensor) {
  return at::empty_strided(
      tensor.sizes(), tensor.strides(), at::TensorOptions(at::kCPU).dtype(tensor.dtype()).pinned_memory(true));
}

/// A message that came into the host's memory reaches its tensor at the end of the wait.
class ReceivedWork final : public c10d::Work {
 public:
  ReceivedWork(at::Tensor tensor, at::Tensor copy, Staging::WorkPtr on_host)
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
  Staging::Tensors result() override {
    return {tensor_};
  }

 private:
  void land() {
    const std::lock_guard lock(copy_back_);
    if (copy_.defined()) tensor_.copy_(std::exchange(copy_, {}));
  }

  std::mutex copy_back_;
  const at::Tensor tensor_;
  at::Tensor copy_;
  const Staging::WorkPtr on_host_;
};

} // namespace

Staging::WorkPtr received(
    Staging::Tensors& tensors, const std::function<Staging::WorkPtr(Staging::Tensors& own)>& receive) {
  if (on_host(tensors) || tensors.size() != 1) return receive(tensors);
  const auto& tensor = tensors.front();
  Staging::Tensors copies{at::empty_like(tensor, at::TensorOptions(at::kCPU), at::MemoryFormat::Contiguous)};
  return c10::make_intrusive<ReceivedWork>(tensor, copies.front(), receive(copies));
}

/// What the program waits for: the collective on the host, then the copies back.
class Staging::StagedWork : public c10d::Work {
 public:
  StagedWork(c10d::OpType type, const Tensors& reads, Tensors writes, Tensors came, const c10::Stream& in)
      : c10d::Work(-1, type, nullptr, reads),
        reads_(reads),
        writes_(std::move(writes)),
        came_(std::move(came)),
        in_(in),
        landed_(in.device_type()),
        future_(c10::make_intrusive<c10::ivalue::Future>(
            c10::ListType::create(c10::TensorType::get()), std::vector<c10::Device>{in.device()})) {}

  /// On the worker's thread, once the collective is done.
  void land(c10::ivalue::Future& on_host) {
    if (on_host.hasError()) return future_->setError(on_host.exception_ptr());
    const c10::StreamGuard guard(in_);
    for (size_t i = 0; i < writes_.size(); ++i) {
      writes_[i].copy_(came_[i], /*non_blocking=*/true);
      // The program may let go of it without waiting.
      guard_of(in_.device()).recordDataPtrOnStream(writes_[i].storage().data_ptr(), in_);
    }
    landed_.record(in_);
    future_->markCompleted(writes_);
  }
  void set_on_host(WorkPtr on_host) {
    on_host_ = std::move(on_host);
  }

  bool wait(std::chrono::milliseconds timeout) override {
    if (!on_host_->wait(timeout)) return false;
    landed_.block(guard_of(in_.device()).getStream(in_.device()));
    return true;
  }
  void synchronize() override {
    wait(kNoTimeout);
  }
  bool isCompleted() override {
    return on_host_->isCompleted();
  }
  bool isSuccess() const override {
    return on_host_->isSuccess();
  }
  std::exception_ptr exception() const override {
    return on_host_->exception();
  }
  Tensors result() override {
    return writes_;
  }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    return future_;
  }

 private:
  /// They stay until they were copied.
  const Tensors reads_;
  Tensors writes_;
  const Tensors came_;
  const c10::Stream in_;
  c10::Event landed_;
  WorkPtr on_host_;
  const c10::intrusive_ptr<c10::ivalue::Future> future_;
};

const at::Tensor& Staging::Copies::of(const at::Tensor& tensor) const {
  const auto found =
      std::find_if(pairs.begin(), pairs.end(), [&](const auto& pair) { return pair.first.is_same(tensor); });
  TORCH_INTERNAL_ASSERT(found != pairs.end());
  return found->second;
}

Staging::Staging(c10::Device device)
    : device_(device),
      out_(guard_of(device).getNewStream(device)),
      in_(guard_of(device).getNewStream(device)) {}

Staging::WorkPtr Staging::carry(
    c10d::OpType type, const Tensors& reads, const Tensors& writes,
    c10::function_ref<void(std::function<void()> ready)> wait_first,
    c10::function_ref<WorkPtr(const Copies& copies)> start) {
  const c10::DeviceGuard device(device_);
  const auto current = guard_of(device_).getStream(device_);
  if (kernels::capture_of(current) != 0) {
    raise_value_error(
        "shardwise: a graph cannot capture a collective of the direct transport, in which the host has a part. Use "
        "NCCL.");
  }
  Copies copies;
  const auto copy_of = [&](const at::Tensor& tensor) {
    for (const auto& [original, copy] : copies.pairs) {
      if (original.is_same(tensor)) return copy;
    }
    const auto copy = pinned_like(tensor);
    copies.pairs.emplace_back(tensor, copy);
    return copy;
  };

  const auto copied = std::make_shared<c10::Event>(device_.type());
  copied->record(current);
  copied->block(out_);
  {
    const c10::StreamGuard guard(out_);
    for (const auto& tensor : reads) copy_of(tensor).copy_(tensor, /*non_blocking=*/true);
  }
  copied->record(out_);
  for (const auto& tensor : writes) copy_of(tensor);

  auto work = c10::make_intrusive<StagedWork>(type, reads, writes, copies.of(writes), in_);
  // The worker's thread never used a device: without a guard it would use the first one, and take memory there.
  wait_first([copied, here = device_] {
    const c10::DeviceGuard guard(here);
    copied->synchronize();
  });
  auto on_host = start(copies);
  work->set_on_host(on_host);
  on_host->getFuture()->addCallback([work, here = device_](c10::ivalue::Future& future) {
    const c10::DeviceGuard guard(here);
    work->land(future);
  });
  return work;
}

} // namespace shardwise::transport
