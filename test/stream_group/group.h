#pragma once

#include "communicator.h"
#include "thread_group/group.h"

#include <memory>
#include <vector>

namespace stream_group {

/// A back end of process groups for ranks that are threads of one process and share one device, of any kind: it knows
/// streams, events and operations of tensors, and nothing of the device. NCCL's rules hold: a collective starts after
/// what the current stream has at the call, those of one communicator run in order, results are there in the order of
/// the stream that waits, and memory must live until the end.
///
/// One thing is not as NCCL has it. A stream can only wait for an event that is recorded already, so a collective is
/// issued when the last rank has called it, and until then wait() blocks the host. From there on only streams wait. Two
/// ranks that wait for different collectives of different communicators therefore wait for each other, until the
/// timeout. (comm::waits_in_stream() stays true: results are in stream order, and the engine starts its sums where all
/// ranks do alike.)
///
/// A thread that shares its device with others must compute its backwards itself, as OnDeviceOfRank has it: autograd's
/// one thread for the device would wait in one rank's backward for another's.
class Group final : public thread_group::Group {
 public:
  Group(
      const c10::intrusive_ptr<c10d::Store>& store, int rank, int size, const at::Device& device,
      std::chrono::milliseconds timeout);

  void abort() override;
  void shutdown() override;

 private:
  c10::intrusive_ptr<c10d::Work> launch_all(
      std::vector<Kernel> kernels, bool in_current_stream, std::chrono::milliseconds timeout) override;

  std::shared_ptr<Communicator> communicator_;
};

} // namespace stream_group
