// The rows of fully_shard_training about lists of modules of which a forward runs only some: a loss in chunks.
#include "ranks/fully_shard_models.h"

namespace shardwise::test {
namespace {

constexpr int kChunks = 3;
constexpr auto kLow = torch::kBFloat16;

/// Its forward leaves out the head, which is in one list with the norm.
struct HeadedImpl : torch::nn::Module {
  HeadedImpl() {
    fill(*this);
  }
  torch::Tensor forward(const torch::Tensor& x) {
    return call(*norm, torch::tanh(call(*second, torch::tanh(call(*first, x)))));
  }
  torch::nn::Linear first = register_module("first", torch::nn::Linear(6, 9));
  torch::nn::Linear second = register_module("second", torch::nn::Linear(9, 9));
  torch::nn::LayerNorm norm = register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({9})));
  torch::nn::Linear head = register_module("head", torch::nn::Linear(9, 5));
};
TORCH_MODULE(Headed);

using Modules = std::vector<std::shared_ptr<torch::nn::Module>>;
using Step = void (*)(Headed& model, const torch::Tensor& x, bool seen);

/// A call that hooks see, or a direct one.
torch::Tensor run_head(Headed& model, const torch::Tensor& x, bool seen) {
  return (seen ? call(*model->head, x) : model->head->forward(x)).to(torch::kFloat).pow(2).mean();
}

void in_one_backward(Headed& model, const torch::Tensor& x, bool seen) {
  const auto hidden = model->forward(x);
  auto total = torch::zeros({});
  for (const auto& chunk : hidden.chunk(kChunks)) total = total + run_head(model, chunk, seen);
  total.backward();
}

/// A backward for each chunk, and one for the rest of the model.
void in_chunks(Headed& model, const torch::Tensor& x, bool seen) {
  const auto hidden = model->forward(x);
  const auto leaf = hidden.detach().requires_grad_();
  for (const auto& chunk : leaf.chunk(kChunks)) run_head(model, chunk, seen).backward();
  hidden.backward(leaf.grad());
}

/// Two forwards that leave out the head, and one backward for both.
void twice_without_head(Headed& model, const torch::Tensor& x, bool /*seen*/) {
  const auto halves = x.chunk(2);
  (model->forward(halves[0]).pow(2).mean() + model->forward(halves[1]).sin().mean()).backward();
}

Unit shard(Headed& model, const FullyShardOptions& options, const FullyShardOptions& of_list) {
  fully_shard(model->first, options);
  fully_shard(model->second, options);
  fully_shard(Modules{model->norm.ptr(), model->head.ptr()}, of_list);
  return fully_shard(model, options);
}

/// `before` is called before each microbatch.
void train(Step step, const std::function<void(Unit&, int number, int micro)>& before = {}, int microbatches = 1) {
  for (const bool seen : {true, false}) {
    run_ranks(2, [&](Rank& rank) {
      Headed ours;
      auto root = shard(ours, sharded_on(rank), sharded_on(rank));
      Pair<Headed> both{rank, ours, Headed()};
      for (int number = 0; number < 4; ++number) {
        for (int micro = 0; micro < microbatches; ++micro) {
          const int data = number * microbatches + micro;
          if (before) before(root, number, micro);
          step(ours, batch(data, rank.rank(), 6), seen);
          for (int r = 0; r < rank.world_size(); ++r) step(both.reference, batch(data, r, 6), seen);
        }
        const torch::NoGradGuard guard;
        for (auto& parameter : both.reference->parameters()) {
          if (parameter.grad().defined()) parameter.mutable_grad() /= rank.world_size();
        }
        both.check("step " + std::to_string(number));
        both.optimize();
      }
    });
  }
}

} // namespace

TEST(FullyShard1DTrainingCompose, DoublePartialForwardThenBackward) {
  train(twice_without_head);
}

TEST(FullyShard1DTrainingCompose, PartialGroupForwardThenStandalone) {
  train(in_one_backward);
  train(in_chunks);
}

TEST(FullyShard1DTrainingCompose, PartialGroupForwardGradAccumChunked) {
  const auto last_synchronizes = [](Unit& root, int, int micro) { root.set_requires_gradient_sync(micro == 2); };
  train(in_one_backward, last_synchronizes, 3);
  train(in_chunks, last_synchronizes, 3);
}

TEST(FullyShard1DTrainingCompose, PartialGroupReshardToggle) {
  const auto toggle = [](Unit& root, int number, int) { root.set_reshard_after_forward(number % 2 == 0); };
  train(in_one_backward, toggle);
  train(in_chunks, toggle);
  run_ranks(2, [](Rank& rank) {
    Headed model;
    auto root = shard(model, sharded_on(rank), sharded_on(rank));
    std::vector<int64_t> gathers;
    for (const bool reshards : {true, false, true, false}) {
      root.set_reshard_after_forward(reshards);
      const auto before = root.counters().all_gathers;
      in_one_backward(model, batch(0, rank.rank(), 6), true);
      gathers.push_back(root.counters().all_gathers - before);
    }
    ASSERT_GT(gathers[2], gathers[3]) << "in the second round the order is known";
  });
}

TEST(FullyShard1DTrainingCompose, GroupedModuleCastForwardInputs) {
  run_ranks(2, [](Rank& rank) {
    Headed ours;
    const auto policy = MixedPrecision().param_dtype(kLow).reduce_dtype(torch::kFloat).output_dtype(torch::kFloat);
    shard(ours, sharded_on(rank), sharded_on(rank).mixed_precision(policy));
    std::vector<at::ScalarType> given;
    for (auto* module :
         {static_cast<torch::nn::Module*>(ours->norm.get()), static_cast<torch::nn::Module*>(ours->head.get())}) {
      register_forward_pre_hook(
          *module, [&](torch::nn::Module&, HookTensors& inputs) { given.push_back(inputs[0].scalar_type()); });
    }
    Headed reference;
    for (int number = 0; number < 3; ++number) {
      given.clear();
      in_one_backward(ours, batch(number, rank.rank(), 6), true);
      ASSERT_EQ(given, std::vector<at::ScalarType>(1 + kChunks, kLow)) << "norm, and head once a chunk";
      for (int r = 0; r < rank.world_size(); ++r) {
        // By hand: what the list's modules are given and have is rounded, what they give is not.
        std::map<std::string, torch::Tensor> low;
        for (const auto& entry : reference->named_parameters()) low[entry.key()] = entry.value().to(kLow);
        const auto body = torch::tanh(reference->second(torch::tanh(reference->first(batch(number, r, 6)))));
        const auto hidden =
            torch::layer_norm(body.to(kLow), {9}, low["norm.weight"], low["norm.bias"]).to(torch::kFloat);
        auto total = torch::zeros({});
        for (const auto& chunk : hidden.chunk(kChunks)) {
          total = total +
                  torch::linear(chunk.to(kLow), low["head.weight"], low["head.bias"]).to(torch::kFloat).pow(2).mean();
        }
        (total / rank.world_size()).backward();
      }
      const auto expected = reference->named_parameters();
      for (const auto& entry : ours->named_parameters()) {
        const auto whole = piece_of(expected[entry.key()].grad(), rank);
        ASSERT_TRUE(torch::allclose(entry.value().grad(), whole, 3e-2, 3e-2)) << entry.key();
      }
      ours->zero_grad();
      reference->zero_grad();
    }
  });
}

} // namespace shardwise::test
