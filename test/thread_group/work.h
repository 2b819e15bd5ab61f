#pragma once

#include "meeting.h"

#include <ATen/core/ivalue.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <memory>
#include <stdexcept>
#include <vector>

namespace thread_group {

using Future = c10::intrusive_ptr<at::ivalue::Future>;

inline Future future_on(const c10::Device& device) {
  return c10::make_intrusive<at::ivalue::Future>(
      c10::ListType::create(c10::TensorType::get()), std::vector<c10::Device>{device});
}

/// A collective on its way. wait() makes the current stream wait, and raises an error once the communicator has failed.
class Work : public c10d::Work {
 public:
  Work(int rank, std::shared_ptr<Communicator> communicator, std::vector<at::Tensor> results, Future future)
      : c10d::Work(rank, c10d::OpType::UNKNOWN),
        communicator_(std::move(communicator)),
        results_(std::move(results)),
        future_(std::move(future)) {}

  bool isSuccess() const override {
    return failure().empty();
  }
  std::exception_ptr exception() const override {
    const auto text = failure();
    return text.empty() ? nullptr : std::make_exception_ptr(std::runtime_error(text));
  }
  bool wait(std::chrono::milliseconds /*timeout*/) override {
    synchronize();
    return true;
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
  virtual std::string failure() const {
    return communicator_->failure();
  }

  const std::shared_ptr<Communicator> communicator_;
  const std::vector<at::Tensor> results_;
  const Future future_;
};

} // namespace thread_group
