#pragma once

// What the tests of full state dicts share.
#include "ranks/fully_shard_models.h"

#include "group/leaf_storage.h"

namespace shardwise::test {

inline void on_worlds(const std::function<void(Rank&)>& fn) {
  on_ranks(fn, by_form<std::vector<int>>({3}, {2, 3, 4}));
}

inline Stack stack_on_meta() {
  return on_meta([] { return Stack(); });
}

/// The layouts that a test goes through.
inline std::vector<FullyShardOptions> layouts(Rank& rank) {
  return {
      sharded_on(rank), sharded_on(rank).layout(ShardLayout::flat), sharded_on(rank).shard_placement(last_dimension)};
}

/// A unit of every kind, a buffer of every kind, a parameter of every kind.
struct ZooImpl : torch::nn::Module {
  ZooImpl() {
    list->append(torch::zeros({3, 2}).requires_grad_());
    again = register_module("again", sharded);
    fine->to(torch::kDouble);
    counts = register_buffer("counts", torch::arange(5));
    flags = register_buffer("flags", torch::tensor({true, false}));
    fill(*this);
  }
  torch::Tensor forward(const torch::Tensor& x) {
    auto y = norm->forward(torch::tanh(sharded->forward(x)));
    y = again->forward(torch::tanh(copied->forward(y)));
    y = fine->forward(y.to(torch::kDouble)).to(torch::kFloat);
    return ignored->forward(y).matmul((*list)[0]) + plain->weight;
  }
  torch::nn::Linear sharded = register_module("sharded", torch::nn::Linear(4, 5));
  torch::nn::BatchNorm1d norm = register_module("norm", torch::nn::BatchNorm1d(5));
  torch::nn::Linear copied = register_module("copied", torch::nn::Linear(5, 4));
  torch::nn::Linear again{nullptr};
  torch::nn::Linear fine = register_module("fine", torch::nn::Linear(5, 3));
  torch::nn::Linear ignored = register_module("ignored", torch::nn::Linear(3, 3));
  torch::nn::ParameterList list = register_module("list", torch::nn::ParameterList());
  torch::nn::Embedding plain = register_module("plain", torch::nn::Embedding(1, 2));
  torch::Tensor counts, flags;
};
TORCH_MODULE(Zoo);

inline torch::Tensor zoo_loss(Zoo& model, int step, int rank) {
  return model->forward(batch(step, rank, 4)).pow(2).sum();
}

inline void shard_zoo(Zoo& model, Rank& rank, const FullyShardOptions& options) {
  replicate(model->copied, on(rank));
  auto one = options;
  fully_shard({model->sharded.ptr(), model->fine.ptr(), model->list.ptr(), model->norm.ptr()}, options);
  fully_shard(model->ignored, one.ignored_parameters({model->ignored->weight}));
}

} // namespace shardwise::test
