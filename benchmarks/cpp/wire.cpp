#include "wire.h"

class Wire::Backend : public c10d::Backend {
 public:
  Backend(std::shared_ptr<Wire> wire, c10::intrusive_ptr<c10d::Backend> inner)
      : c10d::Backend(inner->getRank(), inner->getSize()),
        wire_(std::move(wire)),
        inner_(std::move(inner)) {}

  const std::string getBackendName() const override {
    return "modelled";
  }
  c10::intrusive_ptr<c10d::Work> _allgather_base(
      at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) override {
    const auto start = [&] { return inner_->_allgather_base(output, input, options); };
    return wire_->send(start, {output}, others() * bytes_of(input));
  }
  c10::intrusive_ptr<c10d::Work> _reduce_scatter_base(
      at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& options) override {
    const auto start = [&] { return inner_->_reduce_scatter_base(output, input, options); };
    return wire_->send(start, {output}, others() * bytes_of(output));
  }
  c10::intrusive_ptr<c10d::Work> allreduce(
      std::vector<at::Tensor>& tensors, const c10d::AllreduceOptions& options) override {
    const auto start = [&] { return inner_->allreduce(tensors, options); };
    return wire_->send(start, tensors, 2 * others() / getSize() * bytes_of(tensors.at(0)));
  }
  // What is exchanged before the first step only is not delayed.
  c10::intrusive_ptr<c10d::Work> allgather(
      std::vector<std::vector<at::Tensor>>& outputs, std::vector<at::Tensor>& inputs,
      const c10d::AllgatherOptions& options) override {
    return inner_->allgather(outputs, inputs, options);
  }
  c10::intrusive_ptr<c10d::Work> broadcast(
      std::vector<at::Tensor>& tensors, const c10d::BroadcastOptions& options) override {
    return inner_->broadcast(tensors, options);
  }
  c10::intrusive_ptr<c10d::Work> barrier(const c10d::BarrierOptions& options) override {
    return inner_->barrier(options);
  }

 private:
  double others() const {
    return getSize() - 1;
  }
  static double bytes_of(const at::Tensor& tensor) {
    return static_cast<double>(tensor.nbytes());
  }

  std::shared_ptr<Wire> wire_;
  c10::intrusive_ptr<c10d::Backend> inner_;
};

c10::intrusive_ptr<c10d::Backend> Wire::over(c10::intrusive_ptr<c10d::Backend> inner) {
  return c10::make_intrusive<Backend>(shared_from_this(), std::move(inner));
}

void Wire::set_speed(const Speed& speed) {
  const std::lock_guard lock(mutex_);
  speed_ = speed;
}

Wire::Seconds Wire::busy() const {
  const std::lock_guard lock(mutex_);
  return busy_;
}

double Wire::bytes() const {
  const std::lock_guard lock(mutex_);
  return bytes_;
}

c10::intrusive_ptr<c10d::Work> Wire::send(const Start& start, std::vector<at::Tensor> results, double bytes) {
  Seconds takes{0};
  {
    const std::lock_guard lock(mutex_);
    takes = speed_.latency;
    if (speed_.bytes_per_second > 0) takes += Seconds(bytes / speed_.bytes_per_second);
    busy_ += takes;
    bytes_ += bytes;
  }
  return carry(start, std::move(results), takes);
}

FutureWork::FutureWork(const std::vector<c10::Device>& devices)
    : future_(c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()), devices)) {}

c10::intrusive_ptr<c10::ivalue::Future> FutureWork::getFuture() {
  return future_;
}

bool FutureWork::wait(std::chrono::milliseconds timeout) {
  const bool done = c10d::Work::wait(timeout);
  // It is completed: this is for streams.
  future_->waitAndThrow();
  return done;
}

void FutureWork::end(const std::vector<at::Tensor>& results, const std::exception_ptr& error) {
  error ? future_->setError(error) : future_->markCompleted(c10::IValue(results));
  finish(error);
}
