#include "nn/wrap/loaded_pieces.h"

#include "engine/front_end.h"

#include <shardwise/error.h>

#include <c10/util/StringUtil.h>
#include <torch/nn.h>

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

void refuse_below(const torch::nn::Module& module, const std::string& prefix, const char* function) {
  const auto made = made_for(module);
  if (is_piece(made)) {
    throw Error(c10::str(
        "shardwise: ", function, "(): '", prefix, "weight' has sizes ", made.weight.sizes(), ", but its ",
        module.name(), " was made for ", at::IntArrayRef(made.sizes),
        ". It is a shard, from an archive of shards that was loaded before the module was wrapped. Load such an "
        "archive after wrapping, each rank its own, on as many ranks as saved it; or load whole parameters with "
        "load_full_state_dict()."));
  }
  for (const auto& child : module.named_children()) refuse_below(*child.value(), prefix + child.key() + ".", function);
}

} // namespace

void refuse_loaded_pieces(const torch::nn::Module& module, const char* function) {
  refuse_below(module, "", function);
}

} // namespace shardwise::nn
