// clip_grad_norm_(): the norm over all shards, and the same gradients as in one process.
#include "ranks/state_models.h"

#include <cmath>
#include <limits>

namespace shardwise::test {
namespace {

constexpr auto kInfinity = std::numeric_limits<double>::infinity();

/// Of the parameters given: over their gradients as one vector.
double norm_of(const std::vector<torch::Tensor>& parameters, double order) {
  std::vector<torch::Tensor> all;
  for (const auto& parameter : parameters) {
    if (parameter.grad().defined()) all.push_back(parameter.grad().to(torch::kDouble).flatten());
  }
  return torch::cat(all).norm(order).item<double>();
}

void expect_near(const torch::Tensor& ours, double theirs, const std::string& what, double relative = 1e-5) {
  ASSERT_NEAR(ours.item<double>(), theirs, relative * theirs) << what;
}

} // namespace

TEST(FullyShardClip, EqualsTheNormOfOneProcess) {
  // R47, R48, R49: p in {1, 2, 3, infinity}; what torch does with the whole gradients in one process.
  on_ranks([](Rank& rank) {
    for (const bool placed : {false, true}) {
      auto options = sharded_on(rank);
      if (placed) options.shard_placement(last_dimension);
      auto both = stacks(rank, options);
      auto &ours = both.ours, &reference = both.reference;
      const auto root = unit(*ours);
      for (const auto& entry : reference->named_parameters())
        both.dims[entry.key()] = placed ? entry.value().dim() - 1 : 0;
      int step = 0;
      for (const double order : {1.0, 2.0, 3.0, 0.5, kInfinity}) {
        for (const double share : {0.3, 2.0}) {
          const auto what = c10::str("order ", order, " at ", share);
          both.backward(stack_loss, step++);
          const auto whole = norm_of(reference->parameters(), order);
          const auto theirs = torch::nn::utils::clip_grad_norm_(reference->parameters(), share * whole, order);
          const auto before = root.counters();
          const auto mine = clip_grad_norm_(ours->parameters(), share * whole, order);
          const auto after = root.counters();
          ASSERT_EQ(after.all_reduces - before.all_reduces, 1);
          ASSERT_EQ(after.all_gathers, before.all_gathers);
          ASSERT_EQ(after.unshards, before.unshards);
          expect_near(mine, whole, what);
          if (order >= 1) expect_near(mine, theirs, what);
          both.check(what);
          const auto part = clip_grad_norm_(ours->block(1)->parameters(), 1e9);
          expect_near(part, norm_of(reference->block(1)->parameters(), 2), what + ", a part of the parameters");
          ASSERT_EQ(root.counters().all_reduces - after.all_reduces, 1);
          both.optimize();
        }
      }
      both.check("the end");
    }
  });
}

TEST(FullyShardClip, TiedAndWholeParametersCountOnce) {
  // T16: parameters() lists tied ones twice. T07: those of a ParameterList stay whole, as replicated ones do.
  on_ranks([](Rank& rank) {
    auto both = pair(rank, Zoo(), Zoo());
    auto &ours = both.ours, &reference = both.reference;
    for (const auto* whole : {"list.0", "copied.weight", "copied.bias", "ignored.weight", "plain.weight"}) {
      both.dims[whole] = -1;
    }
    shard_zoo(ours, rank, sharded_on(rank));
    const auto parameters = each_once(*reference);
    int step = 0;
    for (const double order : {2.0, 3.0, 1.0, kInfinity}) {
      const auto what = c10::str("order ", order);
      both.each([](Zoo& model) { model->zero_grad(); });
      both.backward(zoo_loss, step++);
      // Nobody averages these two: they are set to the same everywhere here.
      ours->plain->weight.mutable_grad() = reference->plain->weight.grad().clone();
      ours->ignored->weight.mutable_grad() = reference->ignored->weight.grad().clone();
      const auto whole = norm_of(parameters, order);
      expect_near(clip_grad_norm_(ours, 0.5 * whole, order), whole, what);
      for (const auto& parameter : parameters) parameter.grad().mul_(0.5);
      both.check(what);
    }
    // A replicated module alone needs nobody.
    const auto copies = unit(*ours->copied);
    const auto before = copies.counters().all_reduces;
    expect_near(clip_grad_norm_(ours->copied, 1e9), norm_of(reference->copied->parameters(), 2), "replicated alone");
    ASSERT_EQ(copies.counters().all_reduces, before);
  });
}

TEST(FullyShardClip, SparseGradients) {
  run_ranks(2, [](Rank& rank) {
    torch::nn::Linear sharded(1, 6);
    fully_shard(sharded, sharded_on(rank));
    torch::nn::Embedding table(torch::nn::EmbeddingOptions(7, 3).sparse(true));
    table->forward(torch::tensor({0, 2, 2})).sum().backward();
    auto parameters = sharded->parameters();
    for (auto& parameter : parameters) parameter.mutable_grad() = torch::ones_like(parameter);
    parameters.push_back(table->weight);
    // Twelve ones, then three ones and three twos.
    const auto norm = std::sqrt(12 + 3 + 3 * 4.0);
    expect_near(clip_grad_norm_(parameters, 0.5 * norm), norm, "before");
    expect_near(clip_grad_norm_(parameters, 1e9), 0.5 * norm, "after");
    assert_close(table->weight.grad().to_dense()[2], torch::ones({3}), "a row that was used twice");
  });
}

TEST(FullyShardClip, MissingGradientsAndEmptyShards) {
  // R27: a rank that has no rows of any parameter takes part.
  run_ranks(4, [](Rank& rank) {
    auto both = pair(rank, mlp({3, 4, 4, 2}), mlp({3, 4, 4, 2}));
    auto &ours = both.ours, &reference = both.reference;
    const auto narrow = ours->ptr(4);
    fully_shard(narrow, sharded_on(rank));
    fully_shard(ours, sharded_on(rank));
    const auto loss = [](torch::nn::Sequential& model, int step, int r) {
      const auto hidden = model->at<torch::nn::LinearImpl>(0).forward(batch(step, r, 3));
      return model->at<torch::nn::LinearImpl>(4).forward(hidden).pow(2).sum();
    };
    for (int step = 0; step < 3; ++step) {
      both.backward(loss, step);
      // What the rank itself dropped is not counted, and nobody waits for it.
      if (rank.rank() == 1) ours->parameters()[0].mutable_grad().reset();
      reference->parameters()[0].mutable_grad()[1].zero_();
      const auto whole = norm_of(reference->parameters(), 2);
      expect_near(clip_grad_norm_(ours->parameters(), 0.5 * whole), whole, c10::str("step ", step));
      ASSERT_FALSE(ours->parameters()[2].grad().defined()) << "unused everywhere";
      assert_close(
          ours->parameters()[5].grad(), piece_of(reference->parameters()[5].grad() * 0.5, rank), "the empty shards");
      both.each([](torch::nn::Sequential& model) { model->zero_grad(); });
    }
    for (const double order : {2.0, kInfinity}) {
      ASSERT_EQ(clip_grad_norm_(ours, 1, order).item<double>(), 0) << "no gradient anywhere";
      if (rank.rank() == 2) narrow->parameters()[0].mutable_grad() = torch::ones_like(narrow->parameters()[0]);
      ASSERT_EQ(clip_grad_norm_(*narrow, 1, order).item<double>(), 0) << "rank 2 has no rows";
    }
  });
}

TEST(FullyShardClip, AllRanksGetOneNorm) {
  // Gradients of plain parameters that differ: one norm and one scale all the same, or shards would drift apart.
  std::vector<double> norms(3);
  run_ranks(3, [&](Rank& rank) {
    Zoo ours;
    shard_zoo(ours, rank, sharded_on(rank));
    for (auto& parameter : ours->parameters()) parameter.mutable_grad() = torch::zeros_like(parameter);
    ours->plain->weight.mutable_grad().fill_(rank.rank() + 1.0);
    norms[rank.rank()] = clip_grad_norm_(ours, 1).item<double>();
  });
  ASSERT_EQ(norms[0], norms[1]);
  ASSERT_EQ(norms[0], norms[2]);
  ASSERT_FLOAT_EQ(norms[0], std::sqrt(2 * (1 + 4 + 9) / 3.0));
}

TEST(FullyShardClip, MixedDtypes) {
  run_ranks(2, [](Rank& rank) {
    // Doubles are not rounded to floats on the way, and 16 bit are not summed up in 16 bit.
    torch::nn::Linear fine(1, 6), coarse(1, 4099);
    fine->to(torch::kDouble);
    coarse->to(torch::kBFloat16);
    fully_shard(fine, sharded_on(rank));
    fully_shard(coarse, sharded_on(rank));
    for (auto& parameter : fine->parameters()) parameter.mutable_grad() = torch::full_like(parameter, 1 + 1e-12);
    for (auto& parameter : coarse->parameters()) parameter.mutable_grad() = torch::ones_like(parameter);
    ASSERT_NEAR(clip_grad_norm_(fine, 1e9).item<double>(), std::sqrt(12.0) * (1 + 1e-12), 1e-14);
    auto both = fine->parameters();
    for (const auto& parameter : coarse->parameters()) both.push_back(parameter);
    ASSERT_NEAR(clip_grad_norm_(both, 8210 / 2.0, 1).item<double>(), 8210, 1e-3);
    ASSERT_NEAR(clip_grad_norm_(both, 1e9, 1).item<double>(), 8210 / 2.0, 1e-3);
  });
}

TEST(FullyShardClip, NotFinite) {
  // R50: what one rank alone has is seen by all of them.
  on_ranks([](Rank& rank) {
    for (const double order : {2.0, kInfinity}) {
      for (const double bad : {std::nan(""), kInfinity}) {
        SCOPED_TRACE(c10::str("order ", order, " with ", bad));
        Stack ours;
        shard_stack(ours, sharded_on(rank));
        stack_loss(ours, 0, rank.rank()).backward();
        const auto bias = ours->block(0)->parameters()[1];
        if (rank.rank() == 1) bias.mutable_grad().fill_(bad);
        const auto before = ours->parameters()[0].grad().clone();
        expect_error<Error>(
            [&] { clip_grad_norm_(ours, 1, order, /*error_if_nonfinite=*/true); },
            {"total norm of order", "no gradient was changed", "error_if_nonfinite"});
        ASSERT_TRUE(torch::equal(ours->parameters()[0].grad(), before));
        const auto norm = clip_grad_norm_(ours, 1, order).item<double>();
        ASSERT_EQ(std::isnan(norm), std::isnan(bad));
        ASSERT_FALSE(std::isfinite(norm));
        // As torch does: nothing, or no number.
        const auto& after = ours->parameters()[0].grad();
        ASSERT_TRUE(std::isnan(bad) ? after.isnan().all().item<bool>() : after.eq(0).all().item<bool>());
      }
    }
  });
}

TEST(FullyShardClip, WhatCannotWork) {
  run_ranks(2, [](Rank& rank) {
    Stack ours;
    shard_stack(ours, sharded_on(rank));
    stack_loss(ours, 0, rank.rank()).backward();
    expect_error<ValueError>([&] { clip_grad_norm_(ours, 1, 0); }, {"norm_type is 0", "above 0, or infinity"});
    expect_error<ValueError>([&] { clip_grad_norm_(ours, 1, -kInfinity); }, {"norm_type is -inf"});
    expect_error<ValueError>([&] { clip_grad_norm_(ours, std::nan("")); }, {"max_norm"});
    expect_error<ValueError>(
        [&] { clip_grad_norm_({ours->block(1)->up->weight}, 1); },
        {"full copy of 'blocks.1.up.weight'", "parameters()"});
    ASSERT_EQ(clip_grad_norm_(std::vector<torch::Tensor>{}, 1).item<double>(), 0);
    // Without units it is torch's.
    Stack plain, reference;
    stack_loss(plain, 0, 0).backward();
    stack_loss(reference, 0, 0).backward();
    expect_near(
        clip_grad_norm_(plain, 0.01), torch::nn::utils::clip_grad_norm_(reference->parameters(), 0.01), "plain");
    assert_same(*plain, *reference, "plain");
  });
}

} // namespace shardwise::test
