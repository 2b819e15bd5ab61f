#include "cuda/nccl.h"

#include "base/torch_versions.h"

#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>
#ifdef SHARDWISE_TORCH_HAS_NCCL2
#include <torch/csrc/distributed/c10d/nccl2/ProcessGroupNCCL.hpp>
#endif

#include <cstdlib>

namespace shardwise::cuda {
namespace {

using Options = c10d::ProcessGroupNCCL::Options;

/// With memory of its own for what it points to, where torch can do that.
template <typename Given>
c10::intrusive_ptr<Given> copy_of(const Given& given) {
  if constexpr (requires { given.clone(); }) {
    return c10::static_intrusive_pointer_cast<Given>(given.clone());
  } else {
    return c10::make_intrusive<Given>(given);
  }
}

/// Collectives run before computations that wait for the same parts of a GPU: others wait for them.
c10::intrusive_ptr<Options> own_options() {
  return Options::create(/*is_high_priority_stream=*/true);
}

/// Those that a program chose for its own group, but for what says which group it is.
c10::intrusive_ptr<Options> options_like(c10d::Backend& other) {
  const auto given = c10::dynamic_intrusive_pointer_cast<Options>(other.getBackendOptions());
  if (!given) return own_options();
  auto options = copy_of(*given);
  options->split_from = nullptr;
  options->split_color = Options::create()->split_color;
  options->global_ranks_in_group.clear();
  return options;
}

/// Whether it is one of torch's back ends for NCCL.
bool is_nccl(const c10d::Backend* backend) {
  return backend != nullptr && backend->getBackendName().starts_with("nccl");
}

#ifdef SHARDWISE_TORCH_HAS_NCCL2

/// As torch chooses for the name "nccl"; beside a group that the program made, the same as there.
bool takes_nccl2(const comm::GroupSpec& spec) {
  if (is_nccl(spec.device_backend.get())) return spec.device_backend->getBackendName() != "nccl";
  const char* chosen = std::getenv("TORCH_DIST_USE_NCCL2"); // NOLINT(concurrency-mt-unsafe)
  const std::string value = chosen == nullptr ? "" : chosen;
  return base::kNccl2IsUsual ? value != "0" : value == "1";
}

#endif

} // namespace

c10::intrusive_ptr<c10d::Backend> make_nccl(const comm::GroupSpec& spec) {
  auto options = is_nccl(spec.device_backend.get()) ? options_like(*spec.device_backend) : own_options();
  options->timeout = spec.timeout;
  options->group_name = spec.name;
#ifdef SHARDWISE_TORCH_HAS_NCCL2
  if (takes_nccl2(spec)) {
    return c10::make_intrusive<c10d::nccl2::ProcessGroupNCCL>(spec.store, spec.rank, spec.size, std::move(options));
  }
#endif
  return c10::make_intrusive<c10d::ProcessGroupNCCL>(spec.store, spec.rank, spec.size, std::move(options));
}

} // namespace shardwise::cuda
