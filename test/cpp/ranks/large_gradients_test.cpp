// Gradients that move into the bucket as soon as they come (CopyBatch::kSmall), in programs that end otherwise than
// with their sum.
#include "ranks/recomputed.h"
#include "ranks/sharded_models.h"
#include "support/expect.h"

namespace shardwise::test::large_gradients {
namespace {

using torch::Tensor;

constexpr int64_t kWidth = 190;

struct ModelImpl : torch::nn::Module {
  ModelImpl() {
    fill(*this);
    const torch::NoGradGuard guard;
    for (auto& parameter : parameters()) parameter.div_(8);
    to(torch::kDouble);
  }
  torch::nn::Linear first = register_module("first", torch::nn::Linear(3, kWidth));
  torch::nn::Linear wide = register_module("wide", torch::nn::Linear(kWidth, kWidth));
};
TORCH_MODULE(Model);

Tensor double_batch(int step, int rank) {
  return batch(step, rank, 3).to(torch::kDouble);
}

Tensor wide(Model& model, const Tensor& x) {
  return torch::tanh(model->wide->forward(x));
}

using Forward = std::function<Tensor(Model& model, const Tensor& x)>;

/// One unit, in both functions, beside a plain model: `train` gets a function that makes a step of both.
void in_both(
    const std::function<void(Model& ours, const std::function<void(int step, const Forward& run)>& step)>& train) {
  for (const bool replicates : {false, true}) {
    on_ranks([&](Rank& rank) {
      Model ours, reference;
      if (replicates) {
        replicate(*ours, on(rank));
      } else {
        fully_shard(*ours, sharded_on(rank));
      }
      torch::optim::SGD optimizer(ours->parameters(), 0.1), expected(reference->parameters(), 0.1);
      train(ours, [&](int step, const Forward& run) {
        run(ours, double_batch(step, rank.rank())).sum().backward();
        reference_backward(rank, [&](int r) { return run(reference, double_batch(step, r)).sum(); });
        const auto text = "step " + std::to_string(step);
        replicates ? assert_same(*ours, *reference, text) : assert_pieces(*ours, *reference, rank, text);
        optimizer.step();
        expected.step();
        optimizer.zero_grad();
        expected.zero_grad();
      });
    });
  }
}

} // namespace

TEST(LargeGradients, OfABackwardThatFailsAreForgotten) {
  in_both([](Model& ours, const auto& step) {
    const Forward run = [](Model& model, const Tensor& x) { return wide(model, model->first->forward(x)); };
    step(0, run);
    for (int number = 1; number < 4; ++number) {
      // The large one has come by then.
      const auto hidden = ours->first->forward(double_batch(9, 0));
      hidden.register_hook([](const Tensor&) -> Tensor { throw std::runtime_error("on purpose"); });
      expect_error<std::exception>([&] { (wide(ours, hidden) * 5).sum().backward(); }, {"on purpose"});
      step(number, run);
    }
  });
}

TEST(LargeGradients, OfABackwardInsideComeAfterTheOuterOne) {
  in_both([](Model& /*ours*/, const auto& step) {
    const Forward run = [](Model& model, const Tensor& x) {
      const auto inner = [&model](const Tensor& y) { return wide(model, y); };
      return wide(model, Recomputed::apply(model->first->forward(x), inner, 2));
    };
    for (int number = 0; number < 3; ++number) step(number, run);
  });
}

} // namespace shardwise::test::large_gradients
