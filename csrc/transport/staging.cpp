#include "transport/staging.h"

#include "base/forked.h"
#include "base/torch_versions.h"
#include "transport/error.h"
#include "transport/gates.h"

#include <ATen/ops/empty_strided.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cstring>

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

/// So that what a collective left undone is seen.
void fill_with_nan(const at::Tensor& copy) {
  std::memset(copy.storage().mutable_data(), 0xFF, copy.storage().nbytes());
}

} // namespace

/// What went wrong on the host since the program last heard of it.
class Staging::Failure {
 public:
  void set(std::exception_ptr error) {
    const std::lock_guard lock(mutex_);
    error_ = std::move(error);
  }
  void raise() {
    const std::lock_guard lock(mutex_);
    if (error_) std::rethrow_exception(std::exchange(error_, nullptr));
  }

 private:
  std::mutex mutex_;
  std::exception_ptr error_;
};

/// What the program waits for: on the host the collective goes on, and `landing` comes after it on the device.
class Staging::StagedWork : public c10d::Work {
 public:
  StagedWork(
      c10d::OpType type, const Tensors& reads, Tensors writes, Works on_host, std::shared_ptr<Landing> landing,
      std::shared_ptr<Failure> failure, const c10::Stream& in)
      : c10d::Work(-1, type, nullptr, reads),
        device_(in.device()),
        writes_(std::move(writes)),
        on_host_(std::move(on_host)),
        landing_(std::move(landing)),
        failure_(std::move(failure)),
        future_(c10::make_intrusive<c10::ivalue::Future>(
            c10::ListType::create(c10::TensorType::get()), std::vector<c10::Device>{device_})) {
    const c10::StreamGuard guard(in);
    future_->markCompleted(writes_);
  }

  bool wait(std::chrono::milliseconds timeout) override {
    if (timeout != kNoTimeout) on_host_->wait(timeout);
    failure_->raise();
    if (on_host_->isCompleted() && !on_host_->isSuccess()) std::rethrow_exception(on_host_->exception());
    landing_->landed.block(guard_of(device_).getStream(device_));
    Tensors past;
    const std::lock_guard lock(landing_->mutex);
    past.swap(landing_->kept); // They go when the lock is free: Python's may need another one for that.
    return true;
  }
  void synchronize() override {
    wait(kNoTimeout);
  }
  bool isCompleted() override {
    return on_host_->isCompleted() && landing_->landed.query();
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
  const c10::Device device_;
  const Tensors writes_;
  const Works on_host_;
  const std::shared_ptr<Landing> landing_;
  const std::shared_ptr<Failure> failure_;
  const c10::intrusive_ptr<c10::ivalue::Future> future_;
};

const at::Tensor& Staging::Copies::of(const at::Tensor& tensor) const {
  const auto found =
      std::find_if(pairs.begin(), pairs.end(), [&](const auto& pair) { return pair.first.is_same(tensor); });
  TORCH_INTERNAL_ASSERT(found != pairs.end());
  return found->second;
}

Staging::Tensors Staging::Copies::of(const Tensors& tensors) const {
  Tensors copies;
  for (const auto& tensor : tensors) copies.push_back(of(tensor));
  return copies;
}

std::vector<Staging::Tensors> Staging::Copies::of(const std::vector<Tensors>& lists) const {
  std::vector<Tensors> copies;
  for (const auto& list : lists) copies.push_back(of(list));
  return copies;
}

Staging::Staging(c10::Device device)
    : forks_(base::forks()),
      device_(device),
      out_(guard_of(device).getNewStream(device)),
      in_(guard_of(device).getNewStream(device)),
      gate_(make_gate(device)),
      failure_(std::make_shared<Failure>()) {}

// What streams have not come past yet is leaked: this may be the thread that opens their gate, or a forked child.
Staging::~Staging() {
  if (base::forks() == forks_) take_what_landed();
  if (landings_.empty()) return;
  [[maybe_unused]] const auto* leaked = std::make_unique<decltype(landings_)>(std::move(landings_)).release();
}

Staging::Works Staging::carry(c10d::OpType type, const Tensors& reads, const Tensors& writes, const Calls& calls) {
  std::vector<std::shared_ptr<Landing>> past;
  const std::lock_guard lock(mutex_);
  const c10::DeviceGuard device(device_);
  if (base::is_capturing(guard_of(device_).getStream(device_))) {
    raise_value_error(
        "shardwise: a graph cannot capture a collective of the direct transport, in which the host has a part. Use "
        "NCCL.");
  }
  failure_->raise();
  past = take_what_landed();
  Copies copies;
  Tensors kept;
  const auto copy_of = [&](const at::Tensor& tensor) {
    for (const auto& [original, copy] : copies.pairs) {
      if (original.is_same(tensor)) return copy;
    }
    const auto copy = pinned_like(tensor);
    copies.pairs.emplace_back(tensor, copy);
    kept.insert(kept.end(), {tensor, copy});
    return copy;
  };

  const auto copied = std::make_shared<c10::Event>(device_.type());
  copied->record(guard_of(device_).getStream(device_));
  copied->block(out_);
  {
    const c10::StreamGuard guard(out_);
    for (const auto& tensor : reads) copy_of(tensor).copy_(tensor, /*non_blocking=*/true);
  }
  copied->record(out_);
  for (const auto& tensor : writes) copy_of(tensor);

  calls.wait_first([copied] { copied->synchronize(); });
  auto on_host = calls.start(copies);

  const auto number = ++number_;
  const auto came = copies.of(writes);
  on_host->getFuture()->addCallback([gate = gate_, failure = failure_, came, number](c10::ivalue::Future& future) {
    if (future.hasError()) {
      std::for_each(came.begin(), came.end(), fill_with_nan);
      failure->set(future.exception_ptr());
    }
    gate->open(number);
  });
  auto landing = std::make_shared<Landing>(device_.type());
  copied->block(in_);
  gate_->hold(in_, number);
  {
    const c10::StreamGuard guard(in_);
    for (size_t i = 0; i < writes.size(); ++i) writes[i].copy_(came[i], /*non_blocking=*/true);
  }
  landing->landed.record(in_);
  landing->kept = std::move(kept);
  landings_.push_back(landing);
  return c10::make_intrusive<StagedWork>(type, reads, writes, std::move(on_host), std::move(landing), failure_, in_);
}

std::vector<std::shared_ptr<Staging::Landing>> Staging::take_what_landed() {
  const auto is_past = [](const std::shared_ptr<Landing>& landing) {
    const std::lock_guard lock(landing->mutex);
    return landing->kept.empty() || landing->landed.query();
  };
  std::vector<std::shared_ptr<Landing>> past;
  for (; !landings_.empty() && is_past(landings_.front()); landings_.pop_front()) past.push_back(landings_.front());
  return past;
}

} // namespace shardwise::transport
