#include "comm/process_group.h"

#include <shardwise/error.h>

#ifdef SHARDWISE_WITH_CUDA
#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>
#endif

namespace shardwise::comm {

#ifdef SHARDWISE_WITH_CUDA

bool has_nccl() {
  return true;
}

c10::intrusive_ptr<c10d::Backend> make_nccl(const GroupSpec& spec) {
  auto options = c10d::ProcessGroupNCCL::Options::create();
  options->timeout = spec.timeout;
  return c10::make_intrusive<c10d::ProcessGroupNCCL>(spec.store, spec.rank, spec.size, std::move(options));
}

#else

bool has_nccl() {
  return false;
}

c10::intrusive_ptr<c10d::Backend> make_nccl(const GroupSpec& spec) {
  throw Error(
      "shardwise: the process group '" + spec.name +
      "' is on a CUDA device, but this build has no NCCL: torch was a CPU build, or SHARDWISE_CUDA was off. Build "
      "shardwise against a CUDA build of torch.");
}

#endif

} // namespace shardwise::comm
