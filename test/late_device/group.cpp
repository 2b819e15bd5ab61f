#include "group.h"

#include "tensors.h"
#include "thread_group/work.h"

#include <ATen/ops/empty.h>
#include <c10/core/StreamGuard.h>

#include <algorithm>
#include <array>
#include <mutex>
#include <utility>

namespace late {
namespace {

std::mutex use_mutex;
std::array<Group::MemoryUse, kDevices> uses_of_memory;

class Work final : public thread_group::Work {
 public:
  Work(
      int rank, at::Device device, Device::Event end, std::shared_ptr<Communicator> communicator,
      const std::vector<at::Tensor>& results, c10::Stream stream)
      : thread_group::Work(rank, std::move(communicator), results, completed(device, results, stream)),
        device_(device),
        end_(std::move(end)) {}

  bool isCompleted() override {
    return Device::of(device_).query(end_) || !isSuccess();
  }
  void synchronize() override {
    if (const auto error = exception()) std::rethrow_exception(error);
    Device::of(device_).wait(current_stream(device_.index()).id(), end_);
  }

 private:
  static thread_group::Future completed(
      const at::Device& device, const std::vector<at::Tensor>& results, const c10::Stream& stream) {
    auto future = thread_group::future_on(device);
    const c10::StreamGuard guard(stream);
    future->markCompleted(at::IValue(results));
    return future;
  }

  const at::Device device_;
  const Device::Event end_;
};

} // namespace

at::Tensor Group::allocateTensor(long size, at::TensorOptions options) {
  auto tensor = at::empty({size}, options);
  own_memory_.emplace_back(tensor.storage().getWeakStorageImpl());
  return tensor;
}

Group::MemoryUse Group::memory_use(int device) {
  const std::lock_guard lock(use_mutex);
  return uses_of_memory[device];
}

void Group::count_use(const at::Tensor& tensor) {
  const auto* storage = tensor.storage().unsafeGetStorageImpl();
  const bool is_own = std::any_of(own_memory_.begin(), own_memory_.end(), [&](const auto& each) {
    const auto living = each.lock();
    return living && living.get() == storage;
  });
  const std::lock_guard lock(use_mutex);
  auto& use = uses_of_memory[device().index()];
  ++(is_own ? use.own : use.elsewhere);
}

Group::Group(
    const c10::intrusive_ptr<c10d::Store>& store, int rank, int size, const at::Device& device,
    std::chrono::milliseconds timeout)
    : thread_group::Group("late", rank, size, device, timeout),
      stream_(device),
      communicator_(thread_group::common<Communicator>(store, rank, size)) {}

void Group::abort() {
  communicator_->fail("aborted");
}

void Group::shutdown() {
  Device::of(device()).synchronize(stream_.get().id(), "shut a communicator down");
}

c10::intrusive_ptr<c10d::Work> Group::launch_all(
    std::vector<Kernel> kernels, bool in_current_stream, std::chrono::milliseconds timeout) {
  if (const auto failure = communicator_->failure(); !failure.empty()) throw std::runtime_error(failure);
  if (!std::exchange(connected_, true)) {
    const std::lock_guard lock(use_mutex);
    ++uses_of_memory[this->device().index()].connecting;
  }
  auto& device = Device::of(this->device());
  const auto current = current_stream(this->device().index());
  const auto stream = in_current_stream ? current : stream_.get();
  if (!in_current_stream) device.wait(stream.id(), device.record(current.id()));

  // Workers must not own memory of the device: it would be given back whenever they are done.
  struct Ready {
    thread_group::Place place;
    thread_group::Part part;
    std::vector<at::Tensor> outputs;
    thread_group::Compute compute;
  };
  std::vector<Ready> ready;
  std::vector<Use> uses;
  std::vector<at::Tensor> results;
  for (auto& each : kernels) {
    auto& own = ready.emplace_back(Ready{each.place, {each.signature, {}}, {}, each.compute});
    for (const auto& tensor : each.reads) {
      count_use(tensor);
      add_uses(tensor, false, uses);
      own.part.inputs.push_back(for_worker(tensor));
    }
    for (const auto& tensor : each.writes) {
      count_use(tensor);
      add_uses(tensor, true, uses);
      own.outputs.push_back(for_worker(tensor));
      results.push_back(tensor);
    }
  }
  auto& own_stream = device.stream_of_task(stream.id());
  device.issue(
      stream.id(), kernels.front().name, uses,
      [ready = std::move(ready), communicator = communicator_, timeout, &own_stream] {
        for (const auto& each : ready) communicator->arrive(each.place, each.part, own_stream.time());
        std::vector<std::vector<at::Tensor>> results;
        for (const auto& each : ready) {
          auto computed = communicator->compute(each.place, each.compute, timeout);
          own_stream.advance_to(computed.time);
          results.push_back(std::move(computed.results));
        }
        for (size_t n = 0; n < ready.size(); ++n) {
          if (!communicator->leave(ready[n].place, timeout)) continue;
          for (size_t k = 0; k < results[n].size(); ++k) ready[n].outputs[k].copy_(results[n][k]);
        }
      });
  return c10::make_intrusive<Work>(rank_, this->device(), device.record(stream.id()), communicator_, results, stream);
}

} // namespace late
