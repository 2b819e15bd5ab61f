#pragma once

#include "communicator.h"
#include "device.h"
#include "thread_group/group.h"
#include "thread_group/streams.h"

#include <memory>
#include <vector>

namespace late {

/// A back end of process groups with NCCL's rules, for ranks that are threads of one process and have a device each.
/// A collective starts after what the current stream has at the call, runs on a stream of its communicator, and its
/// wait() makes the current stream wait, not the host. Collectives of one communicator run in order. Memory must live
/// until the end: nothing is kept, and nothing is recorded on the stream.
class Group final : public thread_group::Group {
 public:
  Group(
      const c10::intrusive_ptr<c10d::Store>& store, int rank, int size, const at::Device& device,
      std::chrono::milliseconds timeout);

  bool supportsTensorAlloc(c10::DeviceIndex /*device*/) override {
    return true;
  }
  at::Tensor allocateTensor(long size, at::TensorOptions options) override;

  /// How many tensors of collectives on a device lay in memory that their group had allocated, and how many elsewhere;
  /// and how many collectives had to connect their group's ranks first.
  struct MemoryUse {
    int64_t own = 0;
    int64_t elsewhere = 0;
    int64_t connecting = 0;
  };
  static MemoryUse memory_use(int device);

  void eagerConnectSingleDevice(at::Device /*device*/) override {
    connected_ = true;
  }
  void abort() override;
  void shutdown() override;

 private:
  c10::intrusive_ptr<c10d::Work> launch_all(
      std::vector<Kernel> kernels, bool in_current_stream, std::chrono::milliseconds timeout) override;

  void count_use(const at::Tensor& tensor);

  const thread_group::BorrowedStream stream_;
  bool connected_ = false;
  std::vector<c10::weak_intrusive_ptr<c10::StorageImpl>> own_memory_;
  std::shared_ptr<Communicator> communicator_;
};

} // namespace late
