#pragma once

#include <torch/torch.h>

#include <cstdint>

// A small GPT over bytes, in plain torch::nn: nothing here knows of ranks.
// examples/python/model.py is the same model: the same names, the same order, the same values for the same seed.

struct GptOptions {
  int64_t vocabulary = 256;
  int64_t context = 128;
  int64_t width = 192;
  int64_t heads = 6;
  int64_t layers = 4;
};

/// Attention over what came before, then a two-layer network, each on a normalised input and added to it.
struct BlockImpl : torch::nn::Module {
  explicit BlockImpl(const GptOptions& options)
      : heads(options.heads),
        attention_norm(register_module("attention_norm", norm(options))),
        qkv(register_module("qkv", torch::nn::Linear(options.width, 3 * options.width))),
        projection(register_module("projection", torch::nn::Linear(options.width, options.width))),
        network_norm(register_module("network_norm", norm(options))),
        expand(register_module("expand", torch::nn::Linear(options.width, 4 * options.width))),
        contract(register_module("contract", torch::nn::Linear(4 * options.width, options.width))) {}

  torch::Tensor forward(torch::Tensor x) {
    x = x + projection(attention(qkv(attention_norm(x))));
    return x + contract(torch::gelu(expand(network_norm(x))));
  }

  static torch::nn::LayerNorm norm(const GptOptions& options) {
    return torch::nn::LayerNorm(torch::nn::LayerNormOptions({options.width}));
  }

  int64_t heads;
  torch::nn::LayerNorm attention_norm;
  torch::nn::Linear qkv;
  torch::nn::Linear projection;
  torch::nn::LayerNorm network_norm;
  torch::nn::Linear expand;
  torch::nn::Linear contract;

 private:
  torch::Tensor attention(const torch::Tensor& mixed) const {
    const auto batch = mixed.size(0);
    const auto length = mixed.size(1);
    // [3, batch, heads, length, width of a head]
    const auto parts = mixed.view({batch, length, 3, heads, -1}).permute({2, 0, 3, 1, 4});
    const auto values = torch::scaled_dot_product_attention(
        parts[0], parts[1], parts[2], /*attn_mask=*/{}, /*dropout_p=*/0.0, /*is_causal=*/true);
    return values.transpose(1, 2).reshape({batch, length, -1});
  }
};
TORCH_MODULE(Block);

struct GptImpl : torch::nn::Module {
  explicit GptImpl(const GptOptions& options)
      : bytes(register_module("bytes", torch::nn::Embedding(options.vocabulary, options.width))),
        positions(register_module("positions", torch::nn::Embedding(options.context, options.width))),
        blocks(register_module("blocks", torch::nn::ModuleList())),
        norm(register_module("norm", BlockImpl::norm(options))),
        head(register_module("head", torch::nn::Linear(options.width, options.vocabulary))) {
    for (int64_t i = 0; i < options.layers; ++i) blocks->push_back(Block(options));
  }

  /// The scores of every next byte: [batch, length] of bytes in, [batch, length, vocabulary] out.
  torch::Tensor forward(const torch::Tensor& text) {
    auto x = bytes(text) + positions(torch::arange(text.size(1), text.options()));
    for (const auto& block : *blocks) x = block->as<Block>()->forward(x);
    return head(norm(x));
  }

  torch::nn::Embedding bytes;
  torch::nn::Embedding positions;
  torch::nn::ModuleList blocks;
  torch::nn::LayerNorm norm;
  torch::nn::Linear head;
};
TORCH_MODULE(Gpt);

/// Matrices from a normal distribution, biases zero; norms keep the values they are made with.
inline void initialize(torch::nn::Module& model, uint64_t seed) {
  const torch::NoGradGuard no_grad;
  torch::manual_seed(seed);
  for (const auto& entry : model.named_parameters()) {
    auto parameter = entry.value();
    if (parameter.dim() > 1) {
      parameter.normal_(0.0, 0.02);
    } else if (entry.key().ends_with("bias")) {
      parameter.zero_();
    }
  }
}

inline int64_t number_of_parameters(const torch::nn::Module& model) {
  int64_t count = 0;
  for (const auto& parameter : model.parameters()) count += parameter.numel();
  return count;
}

// How it is trained, alike in all modes.

inline torch::Tensor loss_of(const torch::Tensor& scores, const torch::Tensor& target) {
  return torch::cross_entropy_loss(scores.flatten(0, 1), target.flatten());
}

inline torch::optim::AdamW make_optimizer(const torch::nn::Module& model) {
  return torch::optim::AdamW(model.parameters(), torch::optim::AdamWOptions(1e-3).betas({0.9, 0.95}).weight_decay(0.1));
}
