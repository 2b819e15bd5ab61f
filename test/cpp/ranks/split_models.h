#pragma once

// Models for tensor parallelism, and what a rank should have of them.
#include "ranks/training_parity.h"

namespace shardwise::test {

/// Attention with the weights of queries, keys and values in one, whose heads follow from the sizes of its tensors.
struct HeadsImpl : torch::nn::Module {
  explicit HeadsImpl(int64_t width, int64_t heads) : head(width / heads) {
    in = register_module("in", torch::nn::Linear(width, 3 * width));
    out = register_module("out", torch::nn::Linear(width, width));
  }
  torch::Tensor forward(const torch::Tensor& x) {
    const auto parts = in(x).chunk(3, -1);
    const auto split = [&](const torch::Tensor& part) {
      return part.view({x.size(0), x.size(1), -1, head}).transpose(1, 2);
    };
    const auto scores = split(parts[0]).matmul(split(parts[1]).transpose(-2, -1)).softmax(-1);
    return out(scores.matmul(split(parts[2])).transpose(1, 2).flatten(2));
  }
  int64_t head;
  torch::nn::Linear in{nullptr}, out{nullptr};
};
TORCH_MODULE(Heads);

/// Weights of its own, which it reads in all the ways in which a product can be written.
struct RawImpl : torch::nn::Module {
  RawImpl(int64_t width, int64_t hidden) {
    up = register_parameter("up", torch::randn({width, hidden}));
    up_bias = register_parameter("up_bias", torch::randn({hidden}));
    middle = register_parameter("middle", torch::randn({width, hidden}));
    gate = register_parameter("gate", torch::randn({hidden, width}));
    down = register_parameter("down", torch::randn({hidden, width}));
  }
  torch::Tensor forward(const torch::Tensor& x) {
    const auto flat = x.flatten(0, -2);
    const auto hidden = torch::addmm(up_bias, flat, up) * torch::sigmoid(torch::mm(flat, gate.t())) +
                        torch::matmul(flat, middle) * torch::matmul(flat, gate.transpose(0, 1));
    return torch::matmul(hidden, down).view_as(x);
  }
  torch::Tensor up, up_bias, middle, gate, down;
};
TORCH_MODULE(Raw);

struct SplitBlockImpl : torch::nn::Module {
  SplitBlockImpl(int64_t width, int64_t hidden, int64_t heads)
      : attention(register_module("attention", Heads(width, heads))),
        norm(register_module("norm", torch::nn::LayerNorm(std::vector<int64_t>{width}))),
        up(register_module("up", torch::nn::Linear(width, hidden))),
        down(register_module("down", torch::nn::Linear(hidden, width))),
        raw(register_module("raw", Raw(width, hidden))) {}
  torch::Tensor forward(const torch::Tensor& x) {
    const auto y = x + attention(x);
    return y + down(torch::tanh(up(norm(y)))) + 0.1 * raw(y);
  }
  Heads attention;
  torch::nn::LayerNorm norm;
  torch::nn::Linear up, down;
  Raw raw;
};
TORCH_MODULE(SplitBlock);

/// A table of tokens, which is the weight of the head too, and blocks between the two.
struct SplitModelImpl : torch::nn::Module {
  static constexpr int64_t kWidth = 12;
  explicit SplitModelImpl(int64_t tokens = 10, int64_t hidden = 7, int64_t heads = 12, int blocks = 2)
      : table(register_module("table", torch::nn::Embedding(tokens, kWidth))),
        head(register_module("head", TiedHead(table->weight))) {
    for (int i = 0; i < blocks; ++i) layers->push_back(SplitBlock(kWidth, hidden, heads));
    register_module("blocks", layers);
    fill(*this);
  }
  torch::Tensor forward(const torch::Tensor& tokens) {
    return head(layers->forward(table(tokens)));
  }
  torch::nn::Embedding table;
  TiedHead head;
  torch::nn::Sequential layers;
};
TORCH_MODULE(SplitModel);

inline SplitPlan split_plan(int64_t heads = 12) {
  return {
      {"table", vocabulary()},
      {"head", colwise().gather_output(true)},
      {"blocks.*.attention.in", colwise().segments(3).heads(heads)},
      {"blocks.*.attention.out", rowwise().heads(heads)},
      {"blocks.*.up", colwise()},
      {"blocks.*.down", rowwise()},
      {"blocks.*.raw.up", colwise().transposed(true)},
      {"blocks.*.raw.up_bias", colwise()},
      {"blocks.*.raw.middle", colwise().transposed(true)},
      {"blocks.*.raw.gate", colwise()},
      {"blocks.*.raw.down", rowwise().transposed(true)}};
}

/// What `rank` of `ranks` has of a whole along `dim`, as torch.chunk cuts it.
inline torch::Tensor chunk_of(const torch::Tensor& whole, int64_t ranks, int64_t rank, int64_t dim) {
  const auto chunks = whole.chunk(ranks, dim);
  return rank < static_cast<int64_t>(chunks.size()) ? chunks[rank] : whole.narrow(dim, 0, 0);
}

/// The piece of a parameter of SplitModel by that plan.
inline torch::Tensor split_piece(const std::string& name, const torch::Tensor& whole, int64_t ranks, int64_t rank) {
  const auto ends = [&](const char* end) { return name.ends_with(end); };
  if (ends("table.weight") || ends("head.weight") || ends("up.weight") || ends("up.bias") || ends("up_bias") ||
      ends("gate") || ends("raw.down")) {
    return chunk_of(whole, ranks, rank, 0);
  }
  if (ends("down.weight") || ends("out.weight") || ends("raw.up") || ends("raw.middle")) {
    return chunk_of(whole, ranks, rank, 1);
  }
  if (ends("attention.in.weight") || ends("attention.in.bias")) {
    std::vector<torch::Tensor> pieces;
    for (const auto& segment : whole.chunk(3, 0)) pieces.push_back(chunk_of(segment, ranks, rank, 0));
    return torch::cat(pieces);
  }
  return whole;
}

/// The same for all ranks along an axis of tensor parallelism, different for every step and replica.
inline torch::Tensor tokens_of(int step, int64_t replica, int64_t tokens = 10) {
  return torch::randint(tokens, {3, 4}, generator(100 * step + replica), torch::kLong);
}

inline torch::Tensor loss_of(SplitModel& model, int step, int64_t replica) {
  const auto tokens = tokens_of(step, replica);
  const auto logits = model->forward(tokens);
  return torch::cross_entropy_loss(logits.flatten(0, 1), tokens.roll(1, 1).flatten());
}

/// Every value of a state dict, up to rounding.
inline void expect_near(const StateDict& ours, const StateDict& theirs, const std::string& what) {
  ASSERT_EQ(ours.size(), theirs.size()) << what;
  for (const auto& item : theirs) {
    const auto* mine = ours.find(item.key());
    ASSERT_NE(mine, nullptr) << what << ": " << item.key();
    ASSERT_EQ(mine->sizes(), item.value().sizes()) << what << ": " << item.key();
    ASSERT_TRUE(torch::allclose(mine->to(torch::kDouble), item.value().to(torch::kDouble), 1e-9, 1e-11))
        << what << ": " << item.key() << *mine << item.value();
  }
}

} // namespace shardwise::test
