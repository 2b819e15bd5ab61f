#pragma once

// A small language model, and the ways in which it is cut into units.
#include "ranks/training_parity.h"

namespace shardwise::test {

struct AttentionImpl : torch::nn::Module {
  AttentionImpl(int64_t width, int64_t heads)
      : heads(heads),
        mix(register_module("mix", torch::nn::Linear(torch::nn::LinearOptions(width, 3 * width).bias(false)))),
        out(register_module("out", torch::nn::Linear(torch::nn::LinearOptions(width, width).bias(false)))) {}
  torch::Tensor forward(const torch::Tensor& x) {
    const auto width = x.size(2);
    const auto split = mix->forward(x).view({x.size(0), x.size(1), 3, heads, width / heads}).permute({2, 0, 3, 1, 4});
    const auto future = torch::ones({x.size(1), x.size(1)}, torch::kBool).triu(1);
    auto scores = split[0].matmul(split[1].transpose(2, 3)) / std::sqrt(width / heads);
    scores = scores.masked_fill(future, -1e9);
    return out->forward(torch::softmax(scores, 3).matmul(split[2]).transpose(1, 2).reshape(x.sizes()));
  }
  int64_t heads;
  torch::nn::Linear mix, out;
};
TORCH_MODULE(Attention);

/// Where activations are not kept: `around` a block's forward, or `inside` of it.
enum class Checkpointing { none, around, inside };

template <typename Function>
torch::Tensor checkpoint_if(bool wanted, const Function& fn, const torch::Tensor& x) {
  // Ranks that are threads share the default generator; nothing here draws from it.
  return wanted ? activation_checkpoint(ActivationCheckpointOptions().preserve_rng_state(false), fn, x) : fn(x);
}

struct TransformerBlockImpl : torch::nn::Module {
  TransformerBlockImpl(int64_t width, int64_t heads, Checkpointing checkpointing)
      : checkpointed(checkpointing == Checkpointing::inside),
        norm_1(register_module("norm_1", torch::nn::LayerNorm(torch::nn::LayerNormOptions({width})))),
        attention(register_module("attention", Attention(width, heads))),
        norm_2(register_module("norm_2", torch::nn::LayerNorm(torch::nn::LayerNormOptions({width})))),
        up(register_module("up", torch::nn::Linear(width, 4 * width))),
        down(register_module("down", torch::nn::Linear(4 * width, width))) {}
  torch::Tensor forward(const torch::Tensor& x) {
    return checkpoint_if(
        checkpointed,
        [this](const torch::Tensor& input) {
          const auto middle = input + attention->forward(norm_1->forward(input));
          return middle + down->forward(torch::gelu(up->forward(norm_2->forward(middle))));
        },
        x);
  }
  bool checkpointed;
  torch::nn::LayerNorm norm_1;
  Attention attention;
  torch::nn::LayerNorm norm_2;
  torch::nn::Linear up, down;
};
TORCH_MODULE(TransformerBlock);

struct TransformerSettings {
  int64_t vocabulary = 13;
  int64_t depth = 3;
  bool tied = false;
  Checkpointing checkpointing = Checkpointing::none;
};

constexpr int64_t kWidth = 8;
constexpr int64_t kLength = 5;

struct TransformerImpl : torch::nn::Module {
  explicit TransformerImpl(const TransformerSettings& settings = {})
      : settings(settings),
        tokens(register_module("tokens", torch::nn::Embedding(settings.vocabulary, kWidth))),
        positions(register_module("positions", torch::nn::Embedding(kLength, kWidth))),
        blocks(register_module("blocks", torch::nn::ModuleList())),
        norm(register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({kWidth})))),
        head(register_module(
            "head", TiedHead(settings.tied ? tokens->weight : torch::empty({settings.vocabulary, kWidth})))) {
    for (int64_t i = 0; i < settings.depth; ++i) {
      blocks->push_back(TransformerBlock(kWidth, 2, settings.checkpointing));
    }
    fill(*this);
  }
  TransformerBlock block(size_t i) {
    return TransformerBlock(blocks->ptr<TransformerBlockImpl>(i));
  }
  torch::Tensor forward(const torch::Tensor& text) {
    auto x = tokens->forward(text) + positions->forward(torch::arange(text.size(1)));
    for (size_t i = 0; i < blocks->size(); ++i) {
      const auto run = [this, i](const torch::Tensor& input) { return block(i)->forward(input); };
      x = checkpoint_if(settings.checkpointing == Checkpointing::around, run, x);
    }
    return head->forward(norm->forward(x));
  }
  TransformerSettings settings;
  torch::nn::Embedding tokens, positions;
  torch::nn::ModuleList blocks;
  torch::nn::LayerNorm norm;
  TiedHead head;
};
TORCH_MODULE(Transformer);

/// That of the next token.
inline torch::Tensor text_loss(Transformer& model, int number, int rank) {
  const auto text =
      torch::randint(0, model->settings.vocabulary, {2, kLength + 1}, generator(1000 * number + rank + 17));
  const auto scores = model->forward(text.narrow(1, 0, kLength));
  return torch::cross_entropy_loss(
      scores.reshape({-1, model->settings.vocabulary}), text.narrow(1, 1, kLength).reshape({-1}));
}

inline Program<Transformer> text_program(const TransformerSettings& settings = {}) {
  return {[settings] { return Transformer(settings); }, text_loss};
}

/// The program with these checkpoints, compared with the same without: the same bits with all of them and wrapped in
/// any of these ways. On four ranks the first kind is enough.
inline void train_checkpointed(
    const Program<Transformer>& program, TransformerSettings settings, const std::vector<Checkpointing>& kinds,
    const std::vector<Wrapping<Transformer>>& wrappings) {
  for (auto expected : expect_alone(program)) {
    AlikeRuns runs;
    for (const auto kind : kinds) {
      if (expected.world > 2 && kind != kinds.front()) continue;
      settings.checkpointing = kind;
      expected.program.make = [settings] { return Transformer(settings); };
      for (const auto& wrapping : wrappings) runs.run(expected, wrapping);
    }
  }
}

// `wrap` calls fully_shard() or replicate() on a module, or on a list of them.

/// A unit for each block, and one for the rest.
template <typename Wrap>
void wrap_blocks(Transformer& model, const Wrap& wrap) {
  for (size_t i = 0; i < model->blocks->size(); ++i) wrap(model->block(i));
  wrap(model);
}

/// Which modules are in one unit: each block; all in pairs; each block, and the embedding with the head it is tied to.
enum class Grouping { block, pairs, tied };

template <typename Wrap>
void wrap_groups(Transformer& model, Grouping grouping, const Wrap& wrap) {
  using Modules = std::vector<std::shared_ptr<torch::nn::Module>>;
  const auto block = [&](size_t i) { return model->block(i).ptr(); };
  if (grouping == Grouping::pairs) {
    wrap(model->block(0));
    wrap(Modules{block(1), block(2)});
    // The backward of an embedding does not read it.
    wrap(Modules{model->tokens.ptr(), model->positions.ptr()}).set_unshard_in_backward(false);
    wrap(Modules{model->norm.ptr(), model->head.ptr()});
    wrap(model);
    return;
  }
  if (grouping == Grouping::tied) wrap(Modules{model->tokens.ptr(), model->head.ptr()});
  wrap_blocks(model, wrap);
}

/// Each block has the next two on their way in forward, and in backward the two before it.
inline void prefetch_two_blocks(Transformer& model) {
  const auto of = [&](int i) { return unit(*model->block(i)); };
  const int depth = static_cast<int>(model->blocks->size());
  for (int i = 0; i < depth; ++i) {
    std::vector<Unit> next;
    std::vector<Unit> last;
    for (int k = 1; k <= 2; ++k) {
      if (i + k < depth) next.push_back(of(i + k));
      if (i - k >= 0) last.push_back(of(i - k));
    }
    of(i).set_forward_prefetch(next).set_backward_prefetch(last);
  }
}

} // namespace shardwise::test
