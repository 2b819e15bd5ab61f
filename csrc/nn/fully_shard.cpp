#include <shardwise/fully_shard.h>

#include "nn/unit_table.h"
#include "nn/wrapping.h"

namespace shardwise {
namespace {

void place(std::vector<engine::NamedTensor>& parameters, const FullyShardOptions& options) {
  if (!options.shard_placement()) return;
  for (auto& [names, tensor, dim, whole] : parameters) {
    const auto chosen = options.shard_placement()(names.front(), tensor).value_or(0);
    dim = chosen < 0 ? chosen + tensor.dim() : chosen;
  }
}

Unit shard(const nn::Modules& modules, const FullyShardOptions& options) {
  auto all = nn::tensors_of_unit(modules, options.ignored_parameters(), "fully_shard");
  place(all.parameters, options);
  return Unit(nn::wrap(
      modules, options.mesh() ? *options.mesh() : Mesh::shared(), std::move(all.parameters), all.buffers,
      {.replicates = false,
       .layout = options.layout() == ShardLayout::flat ? group::Layout::flat : group::Layout::rows,
       .precision = options.mixed_precision(),
       .offload = options.cpu_offload(),
       .broadcast = options.broadcast(),
       .reshard_after_forward = options.reshard_after_forward()}));
}

} // namespace

Unit fully_shard(torch::nn::Module& module, const FullyShardOptions& options) {
  return shard({&module}, options);
}

Unit fully_shard(const std::vector<std::shared_ptr<torch::nn::Module>>& modules, const FullyShardOptions& options) {
  return shard(nn::pointers_to(modules), options);
}

} // namespace shardwise
