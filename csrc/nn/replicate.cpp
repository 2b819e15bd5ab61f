#include <shardwise/replicate.h>

#include "nn/unit_hooks.h"
#include "nn/unit_table.h"

namespace shardwise {

Unit replicate(torch::nn::Module& module, const ReplicateOptions& options) {
  auto tensors = nn::walk(module);
  nn::refuse_second_unit(module, tensors, "replicate");
  nn::ignore(tensors.parameters, options.ignored_parameters());
  auto unit = engine::Unit::create(
      options.mesh() ? *options.mesh() : Mesh::shared(), std::move(tensors.parameters), tensors.buffers,
      {.broadcast = options.broadcast()});
  nn::add_unit(module, unit);
  nn::add_unit_hooks(module, unit);
  return Unit(std::move(unit));
}

} // namespace shardwise
