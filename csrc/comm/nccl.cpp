#include "base/torch_versions.h"
#include "comm/process_group.h"

#ifdef SHARDWISE_WITH_CUDA
#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>
#ifdef SHARDWISE_TORCH_HAS_NCCL2
#include <torch/csrc/distributed/c10d/nccl2/ProcessGroupNCCL.hpp>
#endif

#include <cstdlib>
#endif

namespace shardwise::comm {

#ifdef SHARDWISE_WITH_CUDA

bool has_nccl() {
  return true;
}

#ifdef SHARDWISE_TORCH_HAS_NCCL2

namespace {

/// As torch chooses for the name "nccl"; beside a group that the program made, the same as there.
bool takes_nccl2(const GroupSpec& spec) {
  if (!spec.device_backend.empty()) return spec.device_backend != "nccl";
  const char* chosen = std::getenv("TORCH_DIST_USE_NCCL2"); // NOLINT(concurrency-mt-unsafe)
  const std::string value = chosen == nullptr ? "" : chosen;
  return base::kNccl2IsUsual ? value != "0" : value == "1";
}

} // namespace

#endif

c10::intrusive_ptr<c10d::Backend> make_nccl(const GroupSpec& spec) {
  auto options = c10d::ProcessGroupNCCL::Options::create();
  options->timeout = spec.timeout;
#ifdef SHARDWISE_TORCH_HAS_NCCL2
  if (takes_nccl2(spec)) {
    options->group_name = spec.name;
    return c10::make_intrusive<c10d::nccl2::ProcessGroupNCCL>(spec.store, spec.rank, spec.size, std::move(options));
  }
#endif
  return c10::make_intrusive<c10d::ProcessGroupNCCL>(spec.store, spec.rank, spec.size, std::move(options));
}

#else

bool has_nccl() {
  return false;
}

c10::intrusive_ptr<c10d::Backend> make_nccl(const GroupSpec& /*spec*/) {
  return nullptr;
}

#endif

} // namespace shardwise::comm
