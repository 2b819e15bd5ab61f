#include <shardwise/fully_shard.h>

#include "nn/wrap/unit_table.h"
#include "nn/wrap/wrapping.h"

#include <algorithm>
#include <utility>

namespace shardwise {
namespace {

/// The parameters of each mesh that the user named beside that of the call, which keeps the others.
std::vector<std::pair<Mesh, std::vector<engine::NamedTensor>>> take_other_meshes(
    std::vector<engine::NamedTensor>& parameters, const FullyShardOptions::ParameterMesh& mesh_of, const Mesh& own) {
  std::vector<std::pair<Mesh, std::vector<engine::NamedTensor>>> others;
  std::vector<engine::NamedTensor> rest;
  for (auto& parameter : parameters) {
    const bool is_taken = engine::Unit::of(parameter.tensor) != nullptr;
    const auto mesh = is_taken ? std::nullopt : mesh_of(parameter.names.front(), parameter.tensor);
    if (!mesh || mesh->is_same(own)) {
      rest.push_back(std::move(parameter));
      continue;
    }
    auto known =
        std::find_if(others.begin(), others.end(), [&](const auto& other) { return other.first.is_same(*mesh); });
    if (known == others.end()) known = others.insert(others.end(), {*mesh, {}});
    known->second.push_back(std::move(parameter));
  }
  parameters = std::move(rest);
  return others;
}

Unit shard(const nn::Modules& modules, const FullyShardOptions& options) {
  auto all = nn::tensors_of_unit(modules, options.ignored_parameters(), "fully_shard");
  nn::choose_dims(all.parameters, options.shard_placement());
  nn::choose_dtypes(all.parameters, options.mixed_precision());
  const auto mesh = options.mesh() ? *options.mesh() : Mesh::current();
  engine::UnitSettings settings{
      .replicates = false,
      .layout = options.layout() == ShardLayout::flat ? group::Layout::flat : group::Layout::rows,
      .precision = options.mixed_precision(),
      .offload = options.cpu_offload(),
      .broadcast = options.broadcast(),
      .reshard_after_forward = options.reshard_after_forward()};
  const nn::Exceptions exceptions{.whole = options.whole_parameters(), .allow_aliases = options.allow_aliases()};
  if (options.parameter_mesh()) {
    settings.is_companion = true;
    for (auto& [other, parameters] : take_other_meshes(all.parameters, options.parameter_mesh(), mesh)) {
      const auto companion = nn::wrap(modules, other, std::move(parameters), {}, settings, exceptions);
      for (auto& named : companion->named_parameters()) all.parameters.push_back(std::move(named));
    }
    settings.is_companion = false;
  }
  return Unit(nn::wrap(modules, mesh, std::move(all.parameters), all.buffers, settings, exceptions));
}

} // namespace

Unit fully_shard(torch::nn::Module& module, const FullyShardOptions& options) {
  return shard({&module}, options);
}

Unit fully_shard(const std::vector<std::shared_ptr<torch::nn::Module>>& modules, const FullyShardOptions& options) {
  return shard(nn::pointers_to(modules), options);
}

} // namespace shardwise
