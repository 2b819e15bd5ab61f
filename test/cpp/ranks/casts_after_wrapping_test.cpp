// Modules that are cast after they were wrapped, and modules of one unit that run alone.
#include "ranks/mixed_precision_models.h"

#include "support/expect.h"

namespace shardwise::test {
namespace {

constexpr auto kCast = torch::kBFloat16;
using CastLayers = torch::nn::Sequential;

CastLayers make_cast_layers() {
  CastLayers layers(torch::nn::Linear(6, 9), torch::nn::Tanh(), torch::nn::Linear(9, 3));
  fill(*layers);
  return layers;
}

torch::Tensor cast_loss(CastLayers& model, int step, int rank, std::optional<at::ScalarType> cast) {
  const auto out = call(*model, cast_to(batch(step, rank, 6), cast));
  EXPECT_EQ(out.dtype(), cast.value_or(kCast));
  return out.to(torch::kFloat).pow(2).mean();
}

} // namespace

TEST(CastsAfterWrapping, ComputeInTheDtypeOfThePolicy) {
  for (const bool replicated : {false, true}) {
    run_ranks(2, [&](Rank& rank) {
      LowReference<CastLayers> reference(make_cast_layers, {});
      auto ours = make_cast_layers();
      const auto precision = MixedPrecision().param_dtype(kCast).reduce_dtype(torch::kFloat);
      if (replicated) {
        replicate(ours, ReplicateOptions().mesh(rank.mesh()).mixed_precision(precision));
      } else {
        fully_shard(ours, sharded_on(rank).mixed_precision(precision));
      }
      for (const auto kind : {torch::kDouble, torch::kFloat, kCast, torch::kFloat}) {
        ours->to(kind);
        reference.model->to(kind);
        // Steps on a shard of 16 bits are rounded otherwise than steps on all of it.
        if (kind == kCast && !replicated) {
          cast_loss(ours, 0, rank.rank(), std::nullopt).backward();
          for (auto* model : {&ours, &reference.model}) {
            for (auto& parameter : (*model)->parameters()) parameter.mutable_grad() = torch::Tensor();
          }
          continue;
        }
        train_low<CastLayers>(rank, ours, reference, cast_loss, replicated ? 1 : 2);
      }
    });
  }
}

// There are no copies beside the parameters, and whoever holds parameters() holds the members themselves.
TEST(CastsAfterWrapping, OfWhatWasReplicatedWithoutCopiesIsRefused) {
  run_ranks(2, [](Rank& rank) {
    for (const bool direct : {false, true}) {
      auto ours = make_cast_layers();
      ours->to(kCast);
      replicate(ours, ReplicateOptions().mesh(rank.mesh()).mixed_precision(MixedPrecision().param_dtype(kCast)));
      cast_loss(ours, 0, rank.rank(), std::nullopt).backward();
      ours->to(torch::kFloat);
      const auto use = [&] {
        const auto x = batch(1, rank.rank(), 6);
        direct ? ours->forward(x).sum().backward() : cast_loss(ours, 1, rank.rank(), std::nullopt).backward();
      };
      expect_error<Error>(
          use, {c10::str("rank ", rank.rank()), "'0.weight' was cast to float32 after replicate()",
                "computes in bfloat16", "Cast the module first"});
      ours->to(kCast);
      cast_loss(ours, 2, rank.rank(), std::nullopt).backward();
    }
  });
}

TEST(CastsAfterWrapping, OutputsOfAModuleOfAListThatRunsAlone) {
  run_ranks(2, [](Rank& rank) {
    for (const bool replicated : {false, true}) {
      const auto precision = MixedPrecision().param_dtype(kCast).output_dtype(torch::kDouble);
      torch::nn::Linear first(6, 9);
      torch::nn::Linear last(9, 3);
      const std::vector<std::shared_ptr<torch::nn::Module>> both{first.ptr(), last.ptr()};
      if (replicated) {
        replicate(both, ReplicateOptions().mesh(rank.mesh()).mixed_precision(precision));
      } else {
        fully_shard(both, sharded_on(rank).mixed_precision(precision));
      }
      const auto x = batch(0, rank.rank(), 6);
      ASSERT_EQ(call(first, x).dtype(), torch::kDouble);
      ASSERT_EQ(call(last, call(first, x)).dtype(), torch::kDouble);
      ASSERT_EQ(call(last, torch::ones({2, 9})).dtype(), torch::kDouble);
    }
  });
}

} // namespace shardwise::test
