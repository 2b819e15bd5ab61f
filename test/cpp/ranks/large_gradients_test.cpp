// Gradients that move into the bucket as soon as they come (CopyBatch::kSmall), in programs that end otherwise than
// with their sum.
#include "ranks/fully_shard_models.h"
#include "ranks/recomputed.h"
#include "support/expect.h"

namespace shardwise::test::large_gradients {
namespace {

using torch::Tensor;

constexpr int64_t kWidth = 190;

struct ModelImpl : torch::nn::Module {
  explicit ModelImpl(int64_t width = kWidth) {
    first = register_module("first", torch::nn::Linear(3, width));
    wide = register_module("wide", torch::nn::Linear(width, width));
    fill(*this);
    const torch::NoGradGuard guard;
    for (auto& parameter : parameters()) parameter.div_(8);
    to(torch::kDouble);
  }
  torch::nn::Linear first = nullptr;
  torch::nn::Linear wide = nullptr;
};
TORCH_MODULE(Model);

Tensor wide(Model& model, const Tensor& x) {
  return torch::tanh(model->wide->forward(x));
}

/// The wide layer gets a gradient from a backward, then two from inside of it.
Tensor with_backwards_inside(Model& model, const Tensor& x) {
  const auto inner = [&model](const Tensor& y) { return wide(model, y); };
  return wide(model, Recomputed::apply(model->first->forward(x), inner, 2));
}

} // namespace

TEST(LargeGradients, OfABackwardThatFailsAreForgotten) {
  for (const bool replicates : {false, true}) {
    on_ranks([&](Rank& rank) {
      Pair<Model> both{rank, Model(), Model()};
      replicates ? replicate(both.ours, on(rank)) : fully_shard(both.ours, sharded_on(rank));
      if (replicates) both.shards = 1;
      const auto first = [](Model& model, int step, int r) {
        return model->first->forward(batch(step, r, 3).to(torch::kDouble));
      };
      for (int step = 0; step < 4; ++step) {
        if (step > 0) {
          // The large one has come by then.
          const auto hidden = first(both.ours, 9, 0);
          hidden.register_hook([](const Tensor&) -> Tensor { throw std::runtime_error("on purpose"); });
          expect_error<std::exception>([&] { (wide(both.ours, hidden) * 5).sum().backward(); }, {"on purpose"});
        }
        const auto loss = [&](Model& model, int number, int r) {
          const auto hidden = first(model, number, r);
          return (step == 2 ? hidden : wide(model, hidden)).sum();
        };
        both.backward(loss, step);
        both.check(c10::str("step ", step));
        both.each([](Model& model) { descend(*model, 0.1); });
      }
    });
  }
}

TEST(LargeGradients, AddUpInOneOrderWhateverCameFirst) {
  // One sum of the outer backward's, then one of those inside: also where the first has not begun when they come.
  for (const int64_t width : {int64_t{20}, kWidth}) {
    for (const bool replicates : {true, false}) {
      run_ranks(2, [&](Rank& rank) {
        Model ours(width), reference(width);
        for (auto* model : {&ours, &reference}) (*model)->to(torch::kFloat);
        replicates ? replicate(ours, on(rank)) : fully_shard(ours, sharded_on(rank));
        with_backwards_inside(ours, batch(0, rank.rank(), 3)).sum().backward();
        auto outer = torch::zeros({width, width}), inside = outer.clone();
        for (int r = 0; r < 2; ++r) {
          std::vector<Tensor> came;
          const auto hook = reference->wide->weight.register_hook([&](Tensor each) { came.push_back(each); });
          with_backwards_inside(reference, batch(0, r, 3)).sum().backward();
          reference->wide->weight.remove_hook(hook);
          ASSERT_EQ(came.size(), 3);
          outer += came[0] / 2;
          inside += (came[1] + came[2]) / 2;
        }
        const auto expected = outer + inside;
        const auto& mean = replicates ? ours->wide->weight.grad() : ours->parameters()[2].grad();
        ASSERT_TRUE(torch::equal(mean, replicates ? expected : piece_of(expected, rank)));
      });
    }
  }
}

} // namespace shardwise::test::large_gradients
