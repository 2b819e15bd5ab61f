#include <shardwise/replicate.h>

#include "nn/wrap/owners.h"
#include "nn/wrap/unit_table.h"
#include "nn/wrap/wrapping.h"

#include <shardwise/error.h>

#include <c10/util/StringUtil.h>
#include <torch/nn/modules/embedding.h>

namespace shardwise {
namespace {

/// A layer that changes its weight in its forward, for the rows that this rank looks up.
template <typename Embedding>
void refuse_max_norm(const torch::nn::Module& module, const nn::ModuleTensors& all) {
  const auto* layer = module.as<Embedding>();
  if (layer == nullptr || !layer->options.max_norm()) return;
  for (const auto& parameter : all.parameters) {
    if (!parameter.tensor.is_same(layer->weight)) continue;
    throw ValueError(c10::str(
        "shardwise: replicate(): '", parameter.names.front(),
        "' belongs to a layer with max_norm, which changes rows of it in its forward, other ones on each rank, so the "
        "ranks' copies would differ. Leave max_norm out, and bound the rows after each step of the optimizer."));
  }
}

Unit replicate_all(const nn::Modules& modules, const ReplicateOptions& options) {
  auto all = nn::tensors_of_unit(modules, options.ignored_parameters(), "replicate");
  nn::choose_dtypes(all.parameters, options.mixed_precision());
  const auto mesh = options.mesh() ? *options.mesh() : Mesh::current();
  for (auto* module : modules) {
    module->apply([&](const torch::nn::Module& part) {
      if (mesh.size() == 1) return;
      refuse_max_norm<torch::nn::EmbeddingImpl>(part, all);
      refuse_max_norm<torch::nn::EmbeddingBagImpl>(part, all);
    });
  }
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

void check_tensor(const std::string& name, const at::Tensor& tensor, at::Device device) {
  const auto refuse = [&](const std::string& why) {
    throw ValueError(c10::str("shardwise: replicate(): '", name, "' ", why));
  };
  if (!tensor.defined()) refuse("is undefined. Give tensors that have values.");
  if (!tensor.requires_grad()) refuse("needs no gradient, so there is nothing to average. Leave it out.");
  if (!tensor.is_leaf()) refuse("is the result of operations, and gets no gradient. Give the leaf it was made from.");
  if (tensor.device() != device) {
    refuse(c10::str("is on ", tensor.device(), ", but the mesh is on ", device, ". Make it there, or move it first."));
  }
}

void check_options(const ReplicateOptions& options) {
  if (options.mixed_precision().param_dtype() || options.mixed_precision().param_dtype_override() ||
      options.cpu_offload()) {
    throw ValueError(
        "shardwise: replicate() of tensors has no mixed precision of parameters and no cpu_offload: only modules have "
        "a forward in which values can be cast or moved. Register the tensors with a module, and wrap that.");
  }
}

} // namespace

Unit replicate(const torch::OrderedDict<std::string, at::Tensor>& tensors, const ReplicateOptions& options) {
  check_options(options);
  const auto mesh = options.mesh() ? *options.mesh() : Mesh::current();
  std::vector<engine::NamedTensor> all;
  nn::TensorCollection parameters(all);
  for (const auto& item : tensors) {
    check_tensor(item.key(), item.value(), mesh.device());
    if (!nn::is_among(options.ignored_parameters(), item.value())) parameters.add(item.key(), item.value());
  }
  return Unit(nn::wrap(
      {}, mesh, std::move(all), {},
      {.replicates = true,
       .layout = group::Layout::replicate,
       .precision = options.mixed_precision(),
       .broadcast = options.broadcast(),
       .reshard_after_forward = false},
      {}));
}

Unit replicate(const std::vector<at::Tensor>& tensors, const ReplicateOptions& options) {
  torch::OrderedDict<std::string, at::Tensor> named;
  for (size_t i = 0; i < tensors.size(); ++i) named.insert(c10::str("tensors[", i, "]"), tensors[i]);
  return replicate(named, options);
}

Unit replicate(torch::nn::Module& module, const ReplicateOptions& options) {
  return replicate_all({&module}, options);
}

Unit replicate(const std::vector<std::shared_ptr<torch::nn::Module>>& modules, const ReplicateOptions& options) {
  return replicate_all(nn::pointers_to(modules), options);
}

} // namespace shardwise
