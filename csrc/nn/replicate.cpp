#include <shardwise/replicate.h>

#include "nn/unit_table.h"
#include "nn/wrapping.h"

namespace shardwise {
namespace {

Unit replicate_all(const nn::Modules& modules, const ReplicateOptions& options) {
  auto all = nn::tensors_of_unit(modules, options.ignored_parameters(), "replicate");
  nn::choose_dtypes(all.parameters, options.mixed_precision());
  const auto mesh = options.mesh() ? *options.mesh() : Mesh::shared();
  const bool is_moved = options.cpu_offload() && !mesh.device().is_cpu();
  const bool has_full_copies = is_moved || nn::is_cast(all.parameters, options.mixed_precision());
  return Unit(nn::wrap(
      modules, mesh, std::move(all.parameters), all.buffers,
      {.replicates = true,
       .layout = has_full_copies ? group::Layout::rows : group::Layout::replicate,
       .precision = options.mixed_precision(),
       .offload = options.cpu_offload(),
       .broadcast = options.broadcast(),
       .reshard_after_forward = false},
      {.allow_aliases = options.allow_aliases()}));
}

} // namespace

Unit replicate(torch::nn::Module& module, const ReplicateOptions& options) {
  return replicate_all({&module}, options);
}

Unit replicate(const std::vector<std::shared_ptr<torch::nn::Module>>& modules, const ReplicateOptions& options) {
  return replicate_all(nn::pointers_to(modules), options);
}

} // namespace shardwise
