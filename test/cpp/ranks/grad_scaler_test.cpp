// GradScaler: all ranks skip a step that is not finite on one, and train as one process does with the others.
#include "ranks/optimizer_settings.h"

#include "support/expect.h"

#include <limits>
#include <set>

namespace shardwise::test {
namespace {

constexpr auto kInfinite = std::numeric_limits<float>::infinity();

struct Scaling {
  std::set<int> infinite;
  bool unscales = false;
  bool clips = false;
  /// From the gradients to the end of a step: one for the check of shards, one to clip.
  int64_t all_reduces = 1;
};

/// Puts something that is not finite into a gradient of the last rank alone.
void spoil(Stack& model, const Rank& rank, int step) {
  if (rank.rank() + 1 < rank.world_size()) return;
  const torch::NoGradGuard guard;
  for (auto& parameter : model->parameters()) {
    if (parameter.numel() == 0 || !parameter.grad().defined()) continue;
    parameter.mutable_grad().fill_(step % 2 == 0 ? kInfinite : std::numeric_limits<float>::quiet_NaN());
    return;
  }
}

void train_scaled(
    Rank& rank, Stack& ours, torch::optim::Optimizer& mine, const OptimizerPair::Make& their_optimizer,
    const Scaling& scaling, const std::string& what) {
  Stack reference;
  const auto theirs = their_optimizer(reference->parameters());
  GradScaler scaler(GradScalerOptions().init_scale(1024).growth_interval(2));
  double scale = 1024;
  int in_a_row = 0;
  for (int step = 0; step < 7; ++step) {
    mine.zero_grad();
    theirs->zero_grad();
    scaler.scale(stack_loss(ours, step, rank.rank())).backward();
    const bool is_skipped = scaling.infinite.contains(step);
    if (is_skipped) {
      spoil(ours, rank, step);
    } else {
      reference_backward(rank, [&](int r) { return stack_loss(reference, step, r); });
    }
    const auto before = unit(*ours).counters();
    if (scaling.unscales) scaler.unscale_(mine);
    if (scaling.clips) clip_grad_norm_(ours, 0.1);
    scaler.step(mine);
    scaler.update();
    const auto after = unit(*ours).counters();
    ASSERT_EQ(after.all_reduces - before.all_reduces, scaling.all_reduces) << what << ", step " << step;
    ASSERT_EQ(after.all_gathers, before.all_gathers);
    ASSERT_EQ(after.broadcasts, before.broadcasts);
    if (is_skipped) {
      scale *= 0.5;
      in_a_row = 0;
    } else {
      if (scaling.clips) torch::nn::utils::clip_grad_norm_(reference->parameters(), 0.1);
      theirs->step();
      if (++in_a_row == 2) {
        scale *= 2;
        in_a_row = 0;
      }
    }
    assert_state(full_state_dict(ours), plain_state(*reference), c10::str(what, ", step ", step));
    ASSERT_EQ(scaler.get_scale(), scale) << what << ", step " << step;
    ASSERT_EQ(scaler.state_dict()["_growth_tracker"].item<int64_t>(), in_a_row) << what << ", step " << step;
  }
  const auto kept = full_optimizer_state_dict(ours, mine);
  if (kept.contains("state.head.weight.step")) {
    const auto made = static_cast<double>(7 - scaling.infinite.size());
    ASSERT_EQ(kept["state.head.weight.step"].item<double>(), made) << what;
  }
}

void train_all(Rank& rank, const std::function<void(Stack&)>& wrap, const Scaling& scaling, const std::string& name) {
  for (const auto& pair : optimizer_pairs()) {
    for (const bool is_ours : {true, false}) {
      const bool is_chosen = pair.name == "SGD, momentum" || (pair.name == "AdamW" && is_ours);
      if (!is_long_form() && !is_chosen) continue;
      const auto what = c10::str(name, ", ", is_ours ? "" : "torch's ", pair.name);
      rank.step(what);
      Stack model;
      wrap(model);
      const auto optimizer = (is_ours ? pair.ours : pair.theirs)(model->parameters());
      train_scaled(rank, model, *optimizer, pair.theirs, scaling, what);
    }
  }
}

} // namespace

TEST(GradientScaling, AllRanksSkipWhatIsInfiniteOnOne) {
  on_worlds([](Rank& rank) {
    const auto rows = [&](Stack& model) { shard_stack(model, sharded_on(rank)); };
    train_all(rank, rows, {.infinite = {0, 3, 4}}, "divided in the step");
    train_all(rank, rows, {.infinite = {1, 4}, .unscales = true}, "divided before");
    train_all(rank, rows, {.infinite = {}, .unscales = true, .clips = true, .all_reduces = 2}, "clipped");
    const auto copies = [&](Stack& model) { replicate(model, on(rank)); };
    train_all(rank, copies, {.infinite = {}, .all_reduces = 0}, "replicated");
  });
}

TEST(GradientScaling, GradientsOfEveryDtypeAreLookedAt) {
  for (const bool is_finite : {true, false}) {
    const std::vector<torch::Tensor> parameters{torch::ones({3}), torch::ones({2}, torch::kDouble)};
    for (const auto& parameter : parameters) parameter.set_requires_grad(true);
    torch::optim::SGD optimizer(parameters, torch::optim::SGDOptions(1));
    GradScaler scaler(GradScalerOptions().init_scale(4));
    scaler.scale(parameters[0].sum() + parameters[1].sum()).backward();
    if (!is_finite) parameters[1].mutable_grad()[1].fill_(kInfinite);
    scaler.step(optimizer);
    // Gradients of 1 after division, and a step of 1.
    for (const auto& parameter : parameters) {
      EXPECT_TRUE(torch::equal(parameter, torch::full_like(parameter, is_finite ? 0 : 1))) << is_finite << parameter;
    }
  }
}

TEST(GradientScaling, StateGoesOn) {
  const auto parameter = torch::ones({3}).requires_grad_();
  AdamW optimizer({parameter}, torch::optim::AdamWOptions(0.1));
  const auto step = [&](GradScaler& scaler, float gradient) {
    parameter.mutable_grad() = torch::full({3}, gradient);
    scaler.scale(torch::ones({}));
    scaler.step(optimizer);
    scaler.update();
  };
  GradScaler first(GradScalerOptions().init_scale(8).growth_factor(4).growth_interval(3));
  step(first, 1);
  step(first, 1);
  // Before and after the first scale().
  GradScaler fresh, used;
  step(used, 1);
  for (auto* other : {&fresh, &used}) {
    other->load_state_dict(first.state_dict());
    ASSERT_EQ(other->get_scale(), 8);
    step(*other, 1);
    ASSERT_EQ(other->get_scale(), 32) << "the third one in a row";
    step(*other, kInfinite);
    ASSERT_EQ(other->get_scale(), 16);
    other->scale(torch::ones({}));
    other->update(5.0);
    ASSERT_EQ(other->get_scale(), 5);
  }
  // A step without a scaler takes the gradient as it is.
  parameter.mutable_grad() = torch::full({3}, 1.0F);
  step(used, kInfinite);
  const auto before = parameter.detach().clone();
  parameter.mutable_grad() = torch::full({3}, 1.0F);
  optimizer.step();
  ASSERT_TRUE((parameter < before).all().item<bool>());
  auto lacking = first.state_dict();
  lacking.erase("_growth_tracker");
  expect_error<ValueError>([&] { fresh.load_state_dict(lacking); }, {"'_growth_tracker', which is missing"});
}

TEST(GradientScaling, WhereItIsNotEnabled) {
  const auto parameter = torch::ones({3}).requires_grad_();
  SGD optimizer({parameter}, torch::optim::SGDOptions(0.5));
  GradScaler scaler(GradScalerOptions().enabled(false).growth_factor(0));
  const auto loss = (parameter * 2).sum();
  ASSERT_TRUE(scaler.scale(loss).is_same(loss));
  loss.backward();
  scaler.unscale_(optimizer);
  scaler.step(optimizer);
  scaler.update();
  ASSERT_TRUE(torch::equal(parameter, torch::zeros({3})));
  ASSERT_EQ(scaler.get_scale(), 1);
  ASSERT_TRUE(scaler.state_dict().is_empty());
}

TEST(GradientScaling, MisuseIsAnError) {
  const auto parameter = torch::ones({3}).requires_grad_();
  AdamW optimizer({parameter}, torch::optim::AdamWOptions(0.1));
  GradScaler scaler;
  parameter.mutable_grad() = torch::ones({3});
  expect_error<Error>([&] { scaler.step(optimizer); }, {"GradScaler::step() was called before any scale()"});
  expect_error<Error>([&] { scaler.unscale_(optimizer); }, {"GradScaler::unscale_() was called before any scale()"});
  expect_error<Error>([&] { scaler.update(); }, {"GradScaler::update() was called before any scale()"});
  scaler.scale(torch::ones({}));
  expect_error<Error>([&] { scaler.update(); }, {"no gradients were checked since the last time"});
  scaler.unscale_(optimizer);
  expect_error<Error>([&] { scaler.unscale_(optimizer); }, {"unscale_() was called twice for the same optimizer"});
  scaler.step(optimizer);
  expect_error<Error>([&] { scaler.step(optimizer); }, {"GradScaler::step() was called after step()", "update()"});
  expect_error<Error>([&] { scaler.unscale_(optimizer); }, {"GradScaler::unscale_() was called after step()"});
  scaler.update();
  const auto half = torch::ones({3}, torch::kHalf).requires_grad_();
  half.mutable_grad() = torch::ones({3}, torch::kHalf);
  AdamW halves({half}, torch::optim::AdamWOptions(0.1));
  expect_error<ValueError>(
      [&] { scaler.unscale_(halves); }, {"parameter 0 of group 0", "half precision", "unscale_()"});
  scaler.step(halves);
  ASSERT_FALSE(torch::equal(half, torch::ones({3}, torch::kHalf))) << "the operation divides by itself";
  const auto refused = [](const GradScalerOptions& options, const std::string& part) {
    expect_error<ValueError>([&] { GradScaler scaler(options); }, {"GradScaler's ", part});
  };
  refused(GradScalerOptions().init_scale(0), "init_scale is 0; it must be above 0");
  refused(GradScalerOptions().growth_factor(1), "growth_factor is 1; it must be above 1");
  refused(GradScalerOptions().backoff_factor(1), "backoff_factor is 1; it must be above 0 and below 1");
  refused(GradScalerOptions().growth_interval(0), "growth_interval is 0; it must be at least 1");
}

} // namespace shardwise::test
