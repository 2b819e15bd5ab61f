#pragma once

#include "communicator.h"
#include "device.h"

#include <ATen/core/ivalue.h>
#include <c10/core/StreamGuard.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <memory>
#include <stdexcept>
#include <vector>

namespace late {

/// A collective on its way. wait() makes the current stream wait, and raises an error once the communicator has failed.
class Work final : public c10d::Work {
 public:
  Work(
      int rank, at::Device device, Device::Event end, std::shared_ptr<Communicator> communicator,
      std::vector<at::Tensor> results, c10::Stream stream)
      : c10d::Work(rank, c10d::OpType::UNKNOWN),
        device_(device),
        end_(std::move(end)),
        communicator_(std::move(communicator)),
        results_(std::move(results)),
        future_(c10::make_intrusive<at::ivalue::Future>(
            c10::ListType::create(c10::TensorType::get()), std::vector<c10::Device>{device})) {
    const c10::StreamGuard guard(stream);
    future_->markCompleted(at::IValue(results_));
  }

  bool isCompleted() override {
    return Device::of(device_).query(end_) || !communicator_->failure().empty();
  }
  bool isSuccess() const override {
    return communicator_->failure().empty();
  }
  std::exception_ptr exception() const override {
    const auto failure = communicator_->failure();
    return failure.empty() ? nullptr : std::make_exception_ptr(std::runtime_error(failure));
  }
  bool wait(std::chrono::milliseconds /*timeout*/) override {
    synchronize();
    return true;
  }
  void synchronize() override {
    if (const auto error = exception()) std::rethrow_exception(error);
    Device::of(device_).wait(current_stream(device_.index()).id(), end_);
  }
  void abort() override {
    communicator_->fail("aborted");
  }
  std::vector<at::Tensor> result() override {
    return results_;
  }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    return future_;
  }

 private:
  const at::Device device_;
  const Device::Event end_;
  const std::shared_ptr<Communicator> communicator_;
  const std::vector<at::Tensor> results_;
  const c10::intrusive_ptr<at::ivalue::Future> future_;
};

} // namespace late
