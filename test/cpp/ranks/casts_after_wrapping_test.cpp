// Modules that are cast after they were wrapped.
#include "ranks/mixed_precision_models.h"

#include "support/expect.h"

namespace shardwise::test {
namespace {

constexpr auto kCast = torch::kBFloat16;

torch::Tensor cast_loss(torch::nn::Sequential& model, int step, int rank) {
  const auto out = call(*model, batch(step, rank, 6));
  EXPECT_EQ(out.dtype(), kCast);
  return out.to(torch::kFloat).pow(2).mean();
}

} // namespace

// There are no copies beside the parameters, and whoever holds parameters() holds the members themselves.
TEST(CastsAfterWrapping, OfWhatWasReplicatedWithoutCopiesIsRefused) {
  run_ranks(2, [](Rank& rank) {
    for (const bool direct : {false, true}) {
      torch::nn::Sequential ours(torch::nn::Linear(6, 9), torch::nn::Tanh(), torch::nn::Linear(9, 3));
      fill(*ours);
      ours->to(kCast);
      replicate(ours, ReplicateOptions().mesh(rank.mesh()).mixed_precision(MixedPrecision().param_dtype(kCast)));
      cast_loss(ours, 0, rank.rank()).backward();
      ours->to(torch::kFloat);
      const auto use = [&] {
        const auto x = batch(1, rank.rank(), 6);
        direct ? ours->forward(x).sum().backward() : cast_loss(ours, 1, rank.rank()).backward();
      };
      expect_error<Error>(
          use, {c10::str("rank ", rank.rank()), "'0.weight' was cast to float32 after replicate()",
                "computes in bfloat16", "Cast the module first"});
      ours->to(kCast);
      cast_loss(ours, 2, rank.rank()).backward();
    }
  });
}

} // namespace shardwise::test
