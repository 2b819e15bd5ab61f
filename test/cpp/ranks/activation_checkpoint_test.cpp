// Whole models with checkpoints do what they do without, bit by bit. The default generator is this thread's alone.
#include "ranks/models.h"

namespace shardwise::test {
namespace {

using torch::Tensor;
using Tensors = std::vector<Tensor>;

/// A forward with checkpoints in it, or without.
template <typename Model>
using Forward = std::function<Tensor(Model& model, const Tensor& x, bool checkpointed)>;

void expect_equal(const Tensors& values, const Tensors& expected, const std::string& what) {
  ASSERT_EQ(values.size(), expected.size()) << what;
  for (size_t i = 0; i < values.size(); ++i) {
    ASSERT_EQ(values[i].defined(), expected[i].defined()) << what << " " << i;
    if (!values[i].defined()) continue;
    EXPECT_TRUE(torch::equal(values[i], expected[i])) << what << " " << i;
  }
}

Tensors gradients(const Tensors& leaves) {
  Tensors result;
  for (const auto& leaf : leaves) result.push_back(leaf.grad().defined() ? leaf.grad().clone() : leaf.grad());
  return result;
}

/// Three steps of a model with checkpoints, and of a copy of it without.
template <typename Model>
void expect_trains_alike(const std::shared_ptr<Model>& model, const Tensor& x, const Forward<Model>& forward) {
  const auto plain = std::dynamic_pointer_cast<Model>(model->clone());
  torch::optim::AdamW optimizer(model->parameters());
  torch::optim::AdamW plain_optimizer(plain->parameters());
  for (int step = 0; step < 3; ++step) {
    for (const bool input_gradient : {true, false}) {
      const auto run = [&](Model& module, torch::optim::Optimizer& steps, bool checkpointed) {
        torch::manual_seed(step);
        const auto input = x.clone().requires_grad_(input_gradient);
        steps.zero_grad();
        const auto y = forward(module, input * 1, checkpointed);
        (y * torch::arange(1, y.numel() + 1).view(y.sizes())).sum().backward();
        Tensors all = gradients(module.parameters());
        all.push_back(y.detach());
        all.push_back(input.grad());
        all.push_back(torch::rand({4})); // where the generator stands
        steps.step();
        return all;
      };
      const auto with = run(*model, optimizer, true);
      expect_equal(with, run(*plain, plain_optimizer, false), c10::str("step ", step));
      EXPECT_GT(with.front().abs().sum().item().toDouble(), 0);
    }
  }
  expect_equal(model->parameters(), plain->parameters(), "parameters");
}

Tensor maybe(bool checkpointed, const std::function<Tensor(const Tensor&)>& fn, const Tensor& x) {
  return checkpointed ? activation_checkpoint(fn, x) : fn(x);
}

TEST(Checkpoint, NestedWithDropoutTrainsAlike) {
  torch::nn::Sequential layers;
  for (int i = 0; i < 4; ++i) {
    layers->push_back(torch::nn::Linear(6, 6));
    layers->push_back(torch::nn::Dropout(0.4));
  }
  fill(*layers);
  expect_trains_alike<torch::nn::SequentialImpl>(
      layers.ptr(), batch(1, 0, 6), [](torch::nn::SequentialImpl& model, Tensor x, bool on) {
        const auto part = [&model](int from) {
          return [&model, from](const Tensor& t) {
            auto layer = model.begin() + from;
            const auto y = layer->forward(t);
            return (++layer)->forward(y);
          };
        };
        const auto half = [part, on](const Tensor& t) { return maybe(on, part(2), maybe(on, part(0), t)) + t; };
        const auto outer = [part, half, on](const Tensor& t) { return maybe(on, part(4), maybe(on, half, t)); };
        return maybe(on, part(6), maybe(on, outer, x));
      });
}

TEST(Checkpoint, LstmTrainsAlike) {
  const torch::nn::LSTM lstm(torch::nn::LSTMOptions(4, 5).num_layers(2).dropout(0.3).bidirectional(true));
  expect_trains_alike<torch::nn::LSTMImpl>(
      lstm.ptr(), torch::randn({7, 2, 4}), [](torch::nn::LSTMImpl& model, Tensor x, bool on) {
        const auto run = [&](const Tensor& t) { return model.forward(t); };
        const auto [y, state] = on ? activation_checkpoint(run, x) : run(x);
        return y.sum() + (std::get<1>(state) * 2).sum();
      });
}

TEST(Checkpoint, ActivationsAreGoneAfterForward) {
  auto layers = mlp({6, 32, 32, 3});
  std::vector<c10::weak_intrusive_ptr<c10::StorageImpl>> activations;
  int64_t gone_inside = 0;
  const auto gone = [&] {
    return std::count_if(activations.begin(), activations.end(), [](const auto& weak) { return weak.expired(); });
  };
  const auto run = [&](const Tensor& x) {
    auto y = x;
    for (auto& layer : *layers) {
      const auto hidden = layer.forward(y);
      activations.push_back(hidden.storage().getWeakStorageImpl());
      y = hidden.sin();
    }
    return y.sum();
  };
  const auto x = batch(0, 0, 6);
  {
    const auto plain = run(x);
    EXPECT_EQ(gone(), 0) << "without an activation checkpoint they are kept";
  }
  activations.clear();
  auto y = activation_checkpoint(run, x);
  EXPECT_EQ(gone(), 5);
  activations.clear();
  y = activation_checkpoint(
      [&](const Tensor& t) {
        const auto inner = activation_checkpoint(run, t);
        gone_inside = gone();
        return inner * 2;
      },
      x);
  EXPECT_EQ(gone_inside, 5);
  y.backward();
  EXPECT_EQ(gone(), static_cast<int64_t>(activations.size()));
  EXPECT_EQ(activations.size(), 15U) << "forward, its second run, and the second run of the inner one";
}

} // namespace
} // namespace shardwise::test
