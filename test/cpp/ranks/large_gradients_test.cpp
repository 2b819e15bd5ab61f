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

Tensor double_batch(int step, int rank) {
  return batch(step, rank, 3).to(torch::kDouble);
}

Tensor wide(Model& model, const Tensor& x) {
  return torch::tanh(model->wide->forward(x));
}

using Forward = std::function<Tensor(Model& model, const Tensor& x)>;

/// The wide layer gets a gradient from a backward, then two from inside of it.
Tensor with_backwards_inside(Model& model, const Tensor& x) {
  const auto inner = [&model](const Tensor& y) { return wide(model, y); };
  return wide(model, Recomputed::apply(model->first->forward(x), inner, 2));
}

/// One unit, in both functions, beside a plain model: `train` gets a function that makes a step of both.
void in_both(
    const std::function<void(Model& ours, const std::function<void(int step, const Forward& run)>& step)>& train) {
  for (const bool replicates : {false, true}) {
    on_ranks([&](Rank& rank) {
      Pair<Model> both{rank, Model(), Model()};
      replicates ? replicate(both.ours, on(rank)) : fully_shard(both.ours, sharded_on(rank));
      if (replicates) both.shards = 1;
      train(both.ours, [&](int number, const Forward& run) {
        both.backward([&](Model& model, int step, int r) { return run(model, double_batch(step, r)).sum(); }, number);
        both.check("step " + std::to_string(number));
        both.each([](Model& model) { descend(*model, 0.1); });
      });
    });
  }
}

} // namespace

TEST(LargeGradients, OfABackwardThatFailsAreForgotten) {
  in_both([](Model& ours, const auto& step) {
    const Forward run = [](Model& model, const Tensor& x) { return wide(model, model->first->forward(x)); };
    const Forward without_wide = [](Model& model, const Tensor& x) { return model->first->forward(x); };
    step(0, run);
    for (int number = 1; number < 4; ++number) {
      // The large one has come by then.
      const auto hidden = ours->first->forward(double_batch(9, 0));
      hidden.register_hook([](const Tensor&) -> Tensor { throw std::runtime_error("on purpose"); });
      expect_error<std::exception>([&] { (wide(ours, hidden) * 5).sum().backward(); }, {"on purpose"});
      step(number, number == 2 ? without_wide : run);
    }
  });
}

TEST(LargeGradients, OfABackwardInsideComeAfterTheOuterOne) {
  in_both([](Model& /*ours*/, const auto& step) {
    for (int number = 0; number < 3; ++number) step(number, with_backwards_inside);
  });
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
