#include "nn/wrap/unit_table.h"

#include "base/weak_table.h"

#include <shardwise/error.h>
#include <shardwise/unit.h>

#include <c10/util/StringUtil.h>
#include <torch/nn.h>

#include <algorithm>

namespace shardwise::nn {
namespace {

struct Made {
  at::Tensor weight;
  std::vector<int64_t> sizes;
};

template <typename Conv>
void look(const torch::nn::Module& module, Made& made) {
  const auto* conv = module.as<Conv>();
  if (conv == nullptr) return;
  const auto& options = conv->options;
  made = {conv->weight, {options.out_channels(), options.in_channels() / options.groups()}};
  for (const auto size : *options.kernel_size()) made.sizes.push_back(size);
}

Made made_for(const torch::nn::Module& module) {
  Made made;
  if (const auto* linear = module.as<torch::nn::LinearImpl>()) {
    made = {linear->weight, {linear->options.out_features(), linear->options.in_features()}};
  } else if (const auto* embedding = module.as<torch::nn::EmbeddingImpl>()) {
    made = {embedding->weight, {embedding->options.num_embeddings(), embedding->options.embedding_dim()}};
  }
  look<torch::nn::Conv1dImpl>(module, made);
  look<torch::nn::Conv2dImpl>(module, made);
  look<torch::nn::Conv3dImpl>(module, made);
  return made;
}

// A shard is saved with the whole storage that it lies in. A weight that a program itself made smaller has its own; one
// that has a unit may lie in that of a whole unit.
bool is_piece(const Made& made) {
  const auto& weight = made.weight;
  return weight.defined() && weight.has_storage() && weight.sizes() != made.sizes &&
         weight.storage().nbytes() > weight.nbytes() && !engine::Unit::of(weight);
}

/// Raises Error if one of torch's modules, this one or below it, has only a piece of the weight that it was made for:
/// an archive of shards was loaded into it before it was wrapped. `function` is what is being called.
void refuse_loaded_pieces(const torch::nn::Module& module, const char* function) {
  module.apply([&](const std::string& path, const torch::nn::Module& part) {
    const auto made = made_for(part);
    if (!is_piece(made)) return;
    throw Error(c10::str(
        "shardwise: ", function, "(): '", name_in(path, "weight"), "' has sizes ", made.weight.sizes(), ", but its ",
        part.name(), " was made for ", at::IntArrayRef(made.sizes),
        ". It is a shard, from an archive of shards that was loaded before the module was wrapped. Load such an "
        "archive after wrapping, each rank its own, on as many ranks as saved it; or load whole parameters with "
        "load_full_state_dict()."));
  });
}

base::WeakTable<const torch::nn::Module*, engine::Unit>& table() {
  static auto* table = new base::WeakTable<const torch::nn::Module*, engine::Unit>;
  return *table;
}

void refuse_second_unit(const torch::nn::Module& module, const ModuleTensors& tensors, const char* function) {
  const auto unit = find_unit(module, tensors);
  if (!unit) return;
  if (std::string(function) != unit->kind()) {
    throw ValueError(c10::str(
        "shardwise: Cannot apply `", function, "()` on a Module already managed by `", unit->kind(), "`: this ",
        module.name(), ". Choose one of the two for a module."));
  }
  throw ValueError(c10::str(
      "shardwise: ", function, "() was called on this ", module.name(),
      " already. Each distinct composable distributed API can only be applied to a module once."));
}

// A wrapped module has the shard where it had the leaf. A module that still has the leaf was not wrapped with the
// others.
void refuse_sharing_with_others(const std::vector<engine::NamedTensor>& parameters, const char* function) {
  for (const auto& parameter : parameters) {
    const auto& tensor = parameter.tensor;
    // This holds for most parameters, and saves the search below.
    if (engine::unit_of_shard(tensor)) continue;
    const auto owner = engine::Unit::of(tensor);
    if (!owner || !owner->has_full_copies()) continue;
    for (const auto& theirs : owner->parameters()) {
      const auto shard = theirs->visible();
      if (shard.is_same(tensor) || !theirs->alive() || !theirs->leaf().is_same(tensor)) continue;
      const auto seen = std::find_if(
          parameters.begin(), parameters.end(), [&](const auto& other) { return other.tensor.is_same(shard); });
      throw ValueError(c10::str(
          "shardwise: ", function, "(): the parameter '", parameter.names.front(), "' is shared with '",
          seen == parameters.end() ? theirs->name() : seen->names.front(),
          "', which is already managed by another unit: ", owner->kind(),
          "() was called on only one of the modules that share it. Modules that share a parameter must be in one unit: "
          "wrap them in one call, ",
          function, "({first, second}), or wrap only the module around both."));
    }
  }
}

} // namespace

std::shared_ptr<engine::Unit> find_unit(const torch::nn::Module& module, const ModuleTensors& tensors) {
  auto unit = table().find(&module);
  if (!unit) return nullptr;
  const auto& parameters = tensors.parameters;
  const bool same =
      std::any_of(parameters.begin(), parameters.end(), [&](const auto& p) { return unit->has(p.tensor); });
  return same ? unit : nullptr;
}

void add_unit(const torch::nn::Module& module, const std::shared_ptr<engine::Unit>& unit) {
  table().set(&module, unit);
}

ModuleTensors tensors_of_unit(
    const std::vector<torch::nn::Module*>& modules, const std::vector<at::Tensor>& ignored, const char* function) {
  if (modules.empty()) {
    throw ValueError(c10::str("shardwise: ", function, "() got no modules. Give it one or more."));
  }
  for (const auto* module : modules) {
    refuse_loaded_pieces(*module, function);
    refuse_second_unit(*module, walk(*module), function);
  }
  auto all = walk({modules.begin(), modules.end()});
  std::erase_if(all.parameters, [&](const auto& parameter) { return is_among(ignored, parameter.tensor); });
  refuse_sharing_with_others(all.parameters, function);
  return all;
}

} // namespace shardwise::nn

namespace shardwise {

Unit unit(const torch::nn::Module& module) {
  auto found = nn::find_unit(module, nn::walk(module));
  if (!found) {
    throw ValueError(c10::str(
        "shardwise: this ", module.name(),
        " has no unit: neither replicate() nor fully_shard() was called on it, or it has no parameters."));
  }
  return Unit(std::move(found));
}

} // namespace shardwise
