#include <shardwise/replicate.h>

#include "nn/unit_hooks.h"
#include "nn/unit_table.h"

namespace shardwise {
namespace {

Unit replicate_all(const std::vector<torch::nn::Module*>& modules, const ReplicateOptions& options) {
  auto all = nn::tensors_of_unit(modules, options.ignored_parameters(), "replicate");
  auto unit = engine::Unit::create(
      options.mesh() ? *options.mesh() : Mesh::shared(), std::move(all.parameters), all.buffers,
      {.broadcast = options.broadcast()});
  for (auto* module : modules) {
    nn::add_unit(*module, unit);
    nn::add_unit_hooks(*module, unit);
  }
  return Unit(std::move(unit));
}

} // namespace

Unit replicate(torch::nn::Module& module, const ReplicateOptions& options) {
  return replicate_all({&module}, options);
}

Unit replicate(const std::vector<std::shared_ptr<torch::nn::Module>>& modules, const ReplicateOptions& options) {
  std::vector<torch::nn::Module*> pointers;
  for (const auto& module : modules) pointers.push_back(module.get());
  return replicate_all(pointers, options);
}

} // namespace shardwise
