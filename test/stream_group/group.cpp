#include "group.h"

#include <c10/core/impl/VirtualGuardImpl.h>

namespace stream_group {
namespace {

/// The same memory, as a tensor without any mark: of autograd, or of the library that is tested.
at::Tensor plain(const at::Tensor& tensor) {
  const auto& storage = tensor.storage();
  auto same = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(storage),
      c10::DispatchKeySet(
          c10::toRuntimePerBackendFunctionalityKey(c10::DispatchKey::Dense, tensor.key_set().highestBackendKey())),
      tensor.dtype());
  auto* const impl = same.unsafeGetTensorImpl();
  impl->set_storage_offset(tensor.storage_offset());
  impl->set_sizes_and_strides(tensor.sizes(), tensor.strides());
  return same;
}

class Work final : public thread_group::Work {
 public:
  Work(int rank, std::shared_ptr<Call> call, std::shared_ptr<Communicator> communicator)
      : thread_group::Work(rank, communicator, call->results, call->future),
        call_(std::move(call)),
        communicator_(std::move(communicator)) {}

  bool isCompleted() override {
    return communicator_->is_over(*call_);
  }
  void synchronize() override {
    communicator_->wait(*call_);
  }

 private:
  std::string failure() const override {
    return communicator_->failure(*call_);
  }

  const std::shared_ptr<Call> call_;
  const std::shared_ptr<Communicator> communicator_;
};

} // namespace

Group::Group(
    const c10::intrusive_ptr<c10d::Store>& store, int rank, int size, const at::Device& device,
    std::chrono::milliseconds timeout)
    : thread_group::Group("streams", rank, size, device, timeout),
      communicator_(thread_group::common<Communicator>(store, rank, size, device)) {}

void Group::abort() {
  communicator_->fail("aborted");
}

void Group::shutdown() {
  communicator_->synchronize();
}

c10::intrusive_ptr<c10d::Work> Group::launch_all(
    std::vector<Kernel> kernels, bool in_current_stream, std::chrono::milliseconds timeout) {
  const auto current = c10::impl::VirtualGuardImpl(device().type()).getStream(device());
  auto call = std::make_shared<Call>(device());
  call->missing = kernels.size();
  call->timeout = timeout;
  call->deadline = std::chrono::steady_clock::now() + timeout;
  for (const auto& each : kernels) call->results.insert(call->results.end(), each.writes.begin(), each.writes.end());
  for (auto& each : kernels) {
    Communicator::Arrival arrival{
        {std::move(each.signature), {}}, {}, std::move(each.compute), c10::Event(device().type()), call};
    for (const auto& tensor : each.reads) arrival.part.inputs.push_back(plain(tensor));
    for (const auto& tensor : each.writes) arrival.outputs.push_back(plain(tensor));
    arrival.ready.record(current);
    communicator_->arrive(each.place, std::move(arrival));
  }
  if (in_current_stream) communicator_->wait(*call);
  return c10::make_intrusive<Work>(rank_, std::move(call), communicator_);
}

} // namespace stream_group
