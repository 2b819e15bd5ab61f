// Backwards that run inside of a backward or of a forward: gradients are those of plain LibTorch.
#include "ranks/delays.h"
#include "ranks/gradient_record.h"
#include "ranks/hybrid_models.h"
#include "ranks/recomputed.h"
#include "support/expect.h"

namespace shardwise::test::nested_backward {
namespace {

using torch::Tensor;

/// One pass through a model. `scale` is that of its losses. If it fails, then where a gradient comes to the output of
/// block 0, whose backward is always inside of something.
struct Pass {
  Stack& model;
  double scale;
  bool fails = false;

  Tensor block(size_t i, const Tensor& x) const {
    auto y = model->block(i)->forward(x, 0.5);
    if (i > 0) return y;
    // The root's table is read inside too.
    y = y + 0.1 * torch::linear(torch::linear(x, model->embedding->weight), model->embedding->weight.t());
    if (fails && y.requires_grad())
      y.register_hook([](const Tensor&) -> Tensor { throw std::runtime_error("on purpose"); });
    return y;
  }
  void backward(const Tensor& loss) const {
    (loss * scale).backward();
  }
};
using Way = void (*)(const Pass& pass, const Tensor& x);

/// The first gradients of all come from inside.
void own_function(const Pass& pass, const Tensor& x) {
  const auto run = [pass](size_t i) { return [pass, i](const Tensor& z) { return pass.block(i, z); }; };
  const auto y = pass.block(2, pass.block(1, Recomputed::apply(x, run(0), 2)));
  pass.backward(Recomputed::apply(y, run(2), 1).pow(2).mean());
}

void two_deep(const Pass& pass, const Tensor& x) {
  const auto inner = [pass](const Tensor& z) { return pass.block(0, z); };
  const auto outer = [pass, inner](const Tensor& z) { return Recomputed::apply(pass.block(1, z), inner, 2); };
  pass.backward(pass.model->head(pass.block(2, Recomputed::apply(x, outer, 1))).pow(2).mean());
}

void in_forward(const Pass& pass, const Tensor& x) {
  pass.backward(pass.block(0, x.detach().requires_grad_()).pow(2).mean());
  const auto y = pass.block(2, pass.block(1, x));
  const auto leaf = y.detach().requires_grad_();
  for (const auto& piece : leaf.chunk(2)) pass.backward(pass.model->head(piece).pow(2).mean());
  y.backward(leaf.grad());
}

/// Between a unit's output and its own backward.
void in_a_hook(const Pass& pass, const Tensor& x) {
  const auto side = pass.block(0, x.detach()).pow(2).mean() * pass.scale;
  const auto y = pass.block(1, x);
  y.register_hook([side](const Tensor& gradient) {
    side.backward();
    return gradient;
  });
  pass.backward(pass.model->head(pass.block(2, y)).pow(2).mean());
}

/// Before the outer backward comes to any unit. It does not come to this one at all.
void in_the_first_hook(const Pass& pass, const Tensor& x) {
  const auto side = pass.block(0, x.detach()).pow(2).mean() * pass.scale;
  const auto loss = pass.model->head(pass.block(2, pass.block(1, x))).pow(2).mean();
  loss.register_hook([side](const Tensor&) { side.backward(); });
  pass.backward(loss);
}

/// One layer of two units, then two of one unit each, which adds two things.
void reversible(const Pass& pass, const Tensor& x) {
  const auto run = [pass](size_t i) { return [pass, i](const Tensor& z) { return pass.block(i, z); }; };
  auto y = Reversible::apply(x, run(0), run(1));
  for (const size_t i : {2, 1}) {
    const auto other = [pass, i](const Tensor& z) { return pass.model->block(i)->reversed(z); };
    y = Reversible::apply(y, run(i), other);
  }
  pass.backward(pass.model->head(y).pow(2).mean());
}

constexpr Way kWays[] = {own_function, two_deep, in_forward, in_a_hook, in_the_first_hook, reversible};
enum class Kind { sharded, kept, replicated, hybrid };
enum class Setting { plain, tied, accumulated, fails };

/// Post-accumulate hooks ran when all of a gradient was there; for each of several backwards, if those were not inside
/// of another one.
void check_hooks(const torch::nn::Module& model, std::map<std::string, std::vector<Tensor>>& seen, bool in_parts) {
  for (const auto& entry : model.named_parameters()) {
    const auto found = std::exchange(seen[entry.key()], {});
    const auto gradient = entry.value().grad();
    ASSERT_TRUE(in_parts || found.size() == (gradient.defined() ? 1 : 0)) << entry.key() << ": " << found.size();
    ASSERT_EQ(found.empty(), !gradient.defined()) << entry.key();
    ASSERT_TRUE(found.empty() || torch::equal(found.back(), gradient)) << entry.key();
  }
}

void train(Rank& rank, Way way, Kind kind, Setting setting, Grid grid) {
  const auto make = [&] { return Stack(6, 3, setting == Setting::tied); };
  Pair<Stack> both{rank, make(), make()};
  if (kind == Kind::replicated) {
    for (auto& block : *both.ours->blocks) replicate(*block, on(rank));
    replicate(both.ours, on(rank));
    both.shards = 1;
  } else if (kind == Kind::hybrid) {
    shard_stack(both.ours, hybrid_on(rank, grid));
    both.shards = grid.shards;
  } else {
    shard_stack(both.ours, sharded_on(rank).reshard_after_forward(kind == Kind::sharded));
  }
  // What was registered for a tied head is never used, and stays whole.
  if (setting == Setting::tied) both.dims = {{"head.weight", -1}};
  auto root = unit(*both.ours);
  std::map<std::string, std::vector<Tensor>> at_hooks;
  for (const auto& entry : both.ours->named_parameters()) record_gradients(entry.value(), at_hooks[entry.key()]);
  const auto run = [&](Stack& model, int step, int r, double scale, bool fails = false) {
    way({model, scale, fails}, model->embedding->forward(tokens(step, r)));
  };
  for (int step = 0; step < 3; ++step) {
    if (setting == Setting::fails && step > 0) {
      expect_error<std::exception>([&] { run(both.ours, 50, rank.rank(), 1, true); }, {"on purpose"});
      both.ours->zero_grad();
    }
    for (const bool is_last : {false, true}) {
      if (!is_last && setting != Setting::accumulated) continue;
      root.set_requires_gradient_sync(is_last);
      const int data = 2 * step + (is_last ? 1 : 0);
      run(both.ours, data, rank.rank(), 1);
      for (int r = 0; r < rank.world_size(); ++r) run(both.reference, data, r, 1.0 / rank.world_size());
    }
    both.check("step " + std::to_string(step));
    check_hooks(*both.ours, at_hooks, way == in_forward || !rank.mesh().device().is_cpu());
    both.optimize();
  }
}

} // namespace

TEST(NestedBackward, GradientsAreThoseOfPlainLibTorch) {
  // Every two of way, kind and setting come together.
  for (int w = 0; w < 6; ++w) {
    for (int k = 0; k < 4; ++k) {
      const auto kind = static_cast<Kind>(k);
      const auto setting = static_cast<Setting>((w + k) % 4);
      const Grid grid{2, w == 0 ? 2 : 1};
      const int world = kind == Kind::hybrid ? grid.world() : 1 + (w + 2 * k) % 3;
      SCOPED_TRACE(c10::str("way ", w, ", kind ", k, ", setting ", (w + k) % 4, ", ", world, " ranks"));
      run_ranks(world, [&](Rank& rank) { train(rank, kWays[w], kind, setting, grid); });
    }
  }
}

TEST(NestedBackward, WhatTheOuterOneUsesStaysGathered) {
  run_ranks(2, [](Rank& rank) {
    auto both = stacks(rank, sharded_on(rank));
    // One unit runs its backward in the midst of another's.
    const auto loss = [](Stack& model, int step, int r) {
      const auto x = model->embedding->forward(tokens(step, r));
      const auto side = model->block(0)->forward(x.detach(), 0.5).pow(2).mean();
      auto block = model->block(1);
      const auto hidden = block->up->forward(model->block(2)->forward(x, 0.5));
      hidden.register_hook([side](const Tensor& gradient) { side.backward(gradient.sum()); });
      return block->down->forward(torch::gelu(hidden)).pow(2).mean() + block->norm->forward(x).pow(2).mean();
    };
    const auto outer = unit(*both.ours->block(1));
    for (int step = 0; step < 3; ++step) {
      const auto before = outer.counters().unshards;
      both.backward(loss, step);
      // The last unit of a forward stays for the backward.
      EXPECT_EQ(outer.counters().unshards - before, 1) << "step " << step;
      both.finish(step);
    }
  });
}

TEST(NestedBackward, OfAnotherModelOnTheSameMesh) {
  // Sums of the outer one are under way or still to come, as chance will have it; all units are of one size, so that
  // nothing but wrong gradients would tell of sums that were mixed up.
  const Delays delays(std::nullopt);
  for (const bool replicates : {false, true}) {
    run_ranks(2, [&](Rank& rank) {
      const auto make = [](uint64_t seed) {
        auto model = mlp({8, 8, 8, 8, 8, 8});
        fill(*model, seed);
        return model;
      };
      auto inner = make(1), outer = make(2), inner_reference = make(1), outer_reference = make(2);
      for (auto* model : {&inner, &outer}) {
        for (const auto& child : (*model)->children()) {
          if (child->parameters().empty()) continue;
          replicates ? replicate(*child, on(rank)) : fully_shard(*child, sharded_on(rank));
        }
        replicates ? replicate(*model, on(rank)) : fully_shard(*model, sharded_on(rank));
      }
      const auto run = [](torch::nn::Sequential& in, torch::nn::Sequential& out, int step, int r, double scale) {
        const auto x = batch(step, r, 8).requires_grad_() * 1;
        x.register_hook([&in, step, r, scale](const Tensor& gradient) {
          const torch::AutoGradMode with_gradients(true);
          (in->forward(batch(step + 50, r, 8)).pow(2).sum() * scale).backward();
          return gradient;
        });
        (out->forward(x).pow(2).sum() * scale).backward();
      };
      const int64_t shards = replicates ? 1 : 0;
      for (int step = 0; step < 8; ++step) {
        run(inner, outer, step, rank.rank(), 1);
        for (int r = 0; r < 2; ++r) run(inner_reference, outer_reference, step, r, 0.5);
        assert_pieces(*inner, *inner_reference, rank, c10::str("inner, step ", step), {}, shards);
        assert_pieces(*outer, *outer_reference, rank, c10::str("outer, step ", step), {}, shards);
        for (auto* model : {&inner, &outer, &inner_reference, &outer_reference}) (*model)->zero_grad();
      }
    });
  }
}

TEST(NestedBackward, GradientsAddUpInTheDtypeOfTheSum) {
  constexpr int64_t kPieces = 32;
  const auto policy = MixedPrecision().param_dtype(torch::kBFloat16).reduce_dtype(torch::kFloat);
  for (const bool replicates : {false, true}) {
    run_ranks(2, [&](Rank& rank) {
      torch::nn::Linear ours(torch::nn::LinearOptions(8, 8).bias(false));
      fill(*ours);
      const auto low = ours->weight.detach().to(torch::kBFloat16, false, /*copy=*/true);
      replicates ? replicate(ours, on(rank).mixed_precision(policy))
                 : fully_shard(ours, sharded_on(rank).mixed_precision(policy));
      const auto input = [&](int r) { return batch(0, r, 8, kPieces).to(torch::kBFloat16).requires_grad_(); };
      const auto loss = [](const Tensor& y) { return (y.to(torch::kFloat) + 1).pow(2).sum(); };
      loss(Recomputed::apply(
               input(rank.rank()), [&](const Tensor& x) { return ours->forward(x); }, kPieces))
          .backward();
      auto mean = torch::zeros({8, 8});
      for (int r = 0; r < 2; ++r) {
        for (const auto& piece : input(r).detach().chunk(kPieces)) {
          const auto weight = low.clone().requires_grad_();
          mean += torch::autograd::grad({loss(torch::linear(piece, weight))}, {weight})[0].to(torch::kFloat) / 2;
        }
      }
      const auto mine = ours->parameters()[0].grad();
      EXPECT_LT(
          (mine - (replicates ? mean : piece_of(mean, rank))).abs().max().item<float>(),
          1e-4 * mean.abs().max().item<float>());
    });
  }
}

} // namespace shardwise::test::nested_backward
