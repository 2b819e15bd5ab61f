#pragma once

// Models for the tests of fully_shard, made of parts as LibTorch programs make them.
#include "ranks/held_sums.h"
#include "ranks/sharded_models.h"

namespace shardwise::test {

/// Direct calls, a method other than forward, arguments of several types.
struct BlockImpl : torch::nn::Module {
  explicit BlockImpl(int64_t width)
      : up(register_module("up", torch::nn::Linear(width, 2 * width))),
        down(register_module("down", torch::nn::Linear(2 * width, width))),
        norm(register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({width})))) {}
  torch::Tensor forward(const torch::Tensor& x, double scale) {
    return x + scale * down->forward(torch::gelu(up(norm(x))));
  }
  torch::Tensor reversed(torch::Tensor x) {
    return torch::tanh(x.matmul(down->weight).matmul(up->weight)) + norm->weight;
  }
  torch::nn::Linear up, down;
  torch::nn::LayerNorm norm;
};
TORCH_MODULE(Block);

struct StackImpl : torch::nn::Module {
  explicit StackImpl(int64_t width = 6, int64_t depth = 3, bool tied = false)
      : embedding(register_module("embedding", torch::nn::Embedding(11, width))),
        blocks(register_module("blocks", torch::nn::ModuleList())),
        head(register_module("head", torch::nn::Linear(torch::nn::LinearOptions(width, 11).bias(false)))) {
    for (int64_t i = 0; i < depth; ++i) blocks->push_back(Block(width));
    fill(*this);
    // T31: what was registered for the head stays there, and is never used.
    if (tied) head->weight = embedding->weight;
  }
  Block block(size_t i) {
    return Block(blocks->ptr<BlockImpl>(i));
  }
  torch::Tensor forward(const torch::Tensor& tokens) {
    auto x = embedding->forward(tokens);
    for (size_t i = 0; i < blocks->size(); ++i) x = block(i)->forward(x, 0.5);
    return head->forward(x);
  }
  torch::nn::Embedding embedding;
  torch::nn::ModuleList blocks;
  torch::nn::Linear head;
};
TORCH_MODULE(Stack);

inline torch::Tensor tokens(int step, int rank) {
  return torch::randint(0, 11, {2, 5}, generator(1000 * step + rank + 17));
}

inline torch::Tensor stack_loss(Stack& model, int step, int rank) {
  return model->forward(tokens(step, rank)).pow(2).mean();
}

inline void shard_blocks(Stack& model, const FullyShardOptions& options) {
  for (auto& block : *model->blocks) fully_shard(*block, options);
}

inline Unit shard_stack(Stack& model, const FullyShardOptions& options) {
  shard_blocks(model, options);
  return fully_shard(model, options);
}

/// Collectives of the user's own, made of others: they are done when they return, and keep no memory of Gloo's.
inline c10::intrusive_ptr<c10d::Work> gather_by_broadcasts(
    torch::Tensor& output, torch::Tensor& input, c10d::ProcessGroup& group) {
  auto parts = output.chunk(group.getSize());
  parts[group.getRank()].copy_(input);
  for (int rank = 0; rank < group.getSize(); ++rank) {
    std::vector<torch::Tensor> part{parts[rank]};
    c10d::BroadcastOptions options;
    options.rootRank = rank;
    group.broadcast(part, options)->wait();
  }
  return nullptr;
}

inline c10::intrusive_ptr<c10d::Work> scatter_by_all_reduce(
    torch::Tensor& output, torch::Tensor& input, c10d::ProcessGroup& group) {
  sum_and_let_go(input, group);
  output.copy_(input.chunk(group.getSize())[group.getRank()]);
  return nullptr;
}

/// A sharded model beside a plain one that sees the data of all ranks.
template <typename Model>
struct Pair {
  Rank& rank;
  Model ours;
  Model reference;
  Dims dims = {};
  int64_t shards = 0;
  std::optional<torch::optim::AdamW> mine = std::nullopt;
  std::optional<torch::optim::AdamW> theirs = std::nullopt;

  /// The same for both models.
  template <typename Act>
  void each(const Act& act) {
    act(ours);
    act(reference);
  }
  template <typename Loss>
  void backward(const Loss& loss, int step) {
    loss(ours, step, rank.rank()).backward();
    reference_backward(rank, [&](int r) { return loss(reference, step, r); });
  }
  void check(const std::string& what) {
    assert_pieces(*ours, *reference, rank, what, dims, shards);
  }
  /// At the latest for the first step: until then the model may be wrapped.
  void make_optimizers() {
    if (mine) return;
    mine.emplace(ours->parameters(), torch::optim::AdamWOptions(0.02));
    theirs.emplace(reference->parameters(), torch::optim::AdamWOptions(0.02));
  }
  void optimize() {
    make_optimizers();
    mine->step();
    theirs->step();
    mine->zero_grad();
    theirs->zero_grad();
  }
  /// The end of a step.
  void finish(int step) {
    check("step " + std::to_string(step));
    optimize();
  }
  template <typename Loss>
  void train(const Loss& loss, int steps = 4, int first = 0) {
    for (int step = first; step < first + steps; ++step) {
      rank.step("step " + std::to_string(step));
      backward(loss, step);
      finish(step);
    }
    check("the end");
  }
};

template <typename Model>
Pair<Model> pair(Rank& rank, Model ours, Model reference) {
  return Pair<Model>{rank, std::move(ours), std::move(reference)};
}

/// A Stack in units, beside a plain one.
inline Pair<Stack> stacks(Rank& rank, const FullyShardOptions& options, int64_t width = 6, int64_t depth = 3) {
  auto both = pair(rank, Stack(width, depth), Stack(width, depth));
  shard_stack(both.ours, options);
  return both;
}

/// The same of a replicated model: a rank has all of it.
template <typename Model>
Pair<Model> pair_of_copies(Rank& rank, Model ours, Model reference) {
  auto both = pair(rank, std::move(ours), std::move(reference));
  both.shards = 1;
  return both;
}

/// A Stack that is replicated in the units of stacks(), beside a plain one.
inline Pair<Stack> stacks_of_copies(Rank& rank) {
  auto both = pair_of_copies(rank, Stack(), Stack());
  for (auto& block : *both.ours->blocks) replicate(*block, on(rank));
  replicate(both.ours, on(rank));
  return both;
}

/// An mlp() that is replicated as one unit, beside a plain one.
inline Pair<torch::nn::Sequential> replicated_mlps(Rank& rank, const std::vector<int64_t>& widths) {
  auto both = pair_of_copies(rank, mlp(widths), mlp(widths));
  replicate(both.ours, on(rank));
  return both;
}

} // namespace shardwise::test
