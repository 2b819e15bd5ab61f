#include <shardwise/fully_shard.h>

#include "nn/unit_table.h"
#include "nn/wrapping.h"

namespace shardwise {
namespace {

Unit shard(const nn::Modules& modules, const FullyShardOptions& options) {
  auto all = nn::tensors_of_unit(modules, options.ignored_parameters(), "fully_shard");
  nn::choose_dims(all.parameters, options.shard_placement());
  return Unit(nn::wrap(
      modules, options.mesh() ? *options.mesh() : Mesh::shared(), std::move(all.parameters), all.buffers,
      {.replicates = false,
       .layout = options.layout() == ShardLayout::flat ? group::Layout::flat : group::Layout::rows,
       .precision = options.mixed_precision(),
       .offload = options.cpu_offload(),
       .broadcast = options.broadcast(),
       .reshard_after_forward = options.reshard_after_forward()},
      {.whole = options.whole_parameters(), .allow_aliases = options.allow_aliases()}));
}

} // namespace

Unit fully_shard(torch::nn::Module& module, const FullyShardOptions& options) {
  return shard({&module}, options);
}

Unit fully_shard(const std::vector<std::shared_ptr<torch::nn::Module>>& modules, const FullyShardOptions& options) {
  return shard(nn::pointers_to(modules), options);
}

} // namespace shardwise
