#include "slow_wire.h"

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <algorithm>

class SlowWire::Late : public c10d::Work {
 public:
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    return future_;
  }
  void end(const std::exception_ptr& error) {
    error ? future_->setError(error) : future_->markCompleted(c10::IValue(std::vector<at::Tensor>()));
    finish(error);
  }

 private:
  c10::intrusive_ptr<c10::ivalue::Future> future_ =
      c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
};

class SlowWire::Backend : public c10d::Backend {
 public:
  Backend(SlowWire& wire, c10::intrusive_ptr<c10d::Backend> inner)
      : c10d::Backend(inner->getRank(), inner->getSize()),
        wire_(wire),
        inner_(std::move(inner)) {}

  const std::string getBackendName() const override {
    return "slow";
  }
  c10::intrusive_ptr<c10d::Work> _allgather_base(
      at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) override {
    return wire_.send(inner_->_allgather_base(output, input, options), others() * bytes_of(input));
  }
  c10::intrusive_ptr<c10d::Work> _reduce_scatter_base(
      at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& options) override {
    return wire_.send(inner_->_reduce_scatter_base(output, input, options), others() * bytes_of(output));
  }
  c10::intrusive_ptr<c10d::Work> allreduce(
      std::vector<at::Tensor>& tensors, const c10d::AllreduceOptions& options) override {
    const auto bytes = 2 * others() / getSize() * bytes_of(tensors.at(0));
    return wire_.send(inner_->allreduce(tensors, options), bytes);
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

  SlowWire& wire_;
  c10::intrusive_ptr<c10d::Backend> inner_;
};

SlowWire::SlowWire() : courier_([this] { deliver(); }) {}

SlowWire::~SlowWire() {
  {
    const std::lock_guard lock(mutex_);
    closed_ = true;
  }
  changed_.notify_all();
  courier_.join();
}

void SlowWire::set_speed(const Speed& speed) {
  const std::lock_guard lock(mutex_);
  speed_ = speed;
}

void SlowWire::put_into(c10d::ProcessGroup& group) {
  const auto inner = group.getBackend(c10::DeviceType::CPU);
  // A type that no group has yet: a group keeps its first back end of each type.
  group.setBackend(
      c10::DeviceType::CPU, c10d::ProcessGroup::BackendType::MPI, c10::make_intrusive<Backend>(*this, inner));
}

std::chrono::duration<double> SlowWire::busy() const {
  const std::lock_guard lock(mutex_);
  return busy_;
}

double SlowWire::bytes() const {
  const std::lock_guard lock(mutex_);
  return bytes_;
}

c10::intrusive_ptr<c10d::Work> SlowWire::send(c10::intrusive_ptr<c10d::Work> work, double bytes) {
  auto late = c10::make_intrusive<Late>();
  {
    const std::lock_guard lock(mutex_);
    auto takes = speed_.latency;
    if (speed_.bytes_per_second > 0) takes += std::chrono::duration<double>(bytes / speed_.bytes_per_second);
    free_ = std::max(free_, Clock::now()) + std::chrono::duration_cast<Clock::duration>(takes);
    busy_ += takes;
    bytes_ += bytes;
    parcels_.push_back({std::move(work), late, free_});
  }
  changed_.notify_all();
  return late;
}

void SlowWire::deliver() {
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [&] { return closed_ || !parcels_.empty(); });
    if (parcels_.empty()) return;
    const auto parcel = std::move(parcels_.front());
    parcels_.pop_front();
    lock.unlock();
    std::exception_ptr error;
    try {
      parcel.work->wait();
    } catch (...) {
      error = std::current_exception();
    }
    std::this_thread::sleep_until(parcel.due);
    parcel.late->end(error);
    lock.lock();
  }
}
