// Norms in low precision, parameters that keep their dtype, units with parameters of several dtypes.
#include "base/torch_versions.h"
#include "ranks/mixed_precision_models.h"
#include "support/expect.h"

namespace shardwise::test::parameter_dtypes {
namespace {

Layers normed() {
  Layers layers(
      torch::nn::Linear(6, 8), torch::nn::LayerNorm(torch::nn::LayerNormOptions({8})), torch::nn::Linear(8, 8),
      torch::nn::GroupNorm(torch::nn::GroupNormOptions(2, 8)), torch::nn::Tanh(), torch::nn::Linear(8, 3));
  fill(*layers);
  return layers;
}

void train_norms(at::ScalarType low) {
  run_ranks(2, [&](Rank& rank) {
    LowReference<Layers> reference(normed, {.param = low});
    auto ours = normed();
    const auto options = sharded_on(rank).mixed_precision(policy({.param = low}));
    for (const auto& part : ours->children()) {
      if (!part->parameters().empty()) fully_shard(*part, options);
    }
    fully_shard(ours, options);
    ASSERT_EQ(call(ours, batch(0, rank.rank(), 6)).scalar_type(), low);
    train_low<Layers>(rank, ours, reference, layers_loss, 2);
  });
}

bool is_norm(const std::string& name) {
  return name.starts_with("1.") || name.starts_with("3.");
}

MixedPrecision with_kept_norms(at::ScalarType low) {
  return policy({.param = low})
      .param_dtype_override(
          [](const std::string& name, const torch::Tensor& parameter) -> std::optional<at::ScalarType> {
            return is_norm(name) ? std::optional(parameter.scalar_type()) : std::nullopt;
          });
}

} // namespace

TEST(FullyShardMixedPrecisionCasts, NormModulesBf16) {
  train_norms(torch::kBFloat16);
}

TEST(FullyShardMixedPrecisionCasts, NormModulesFp16) {
  train_norms(torch::kHalf);
}

TEST(FullyShardCollectiveOps, ReduceScatterUnequalDtypes) {
  const std::vector<at::ScalarType> kinds{torch::kFloat, torch::kBFloat16, torch::kDouble};
  const auto make = [&] {
    Layers layers(torch::nn::Linear(5, 3), torch::nn::Linear(5, 3), torch::nn::Linear(5, 3));
    fill(*layers);
    for (size_t i = 0; i < 3; ++i) layers[i]->to(kinds[i]);
    return layers;
  };
  const auto loss = [&](Layers& model, int step, int r) {
    auto total = torch::zeros({}, torch::kDouble);
    for (size_t i = 0; i < 3; ++i) {
      total =
          total +
          model->at<torch::nn::LinearImpl>(i).forward(batch(step, r, 5).to(kinds[i])).to(torch::kDouble).pow(2).sum();
    }
    return total;
  };
  for (const auto reduce : {std::optional<at::ScalarType>(), std::optional(torch::kFloat)}) {
    run_ranks(2, [&](Rank& rank) {
      auto ours = make();
      auto reference = make();
      auto root = fully_shard(ours, sharded_on(rank).mixed_precision(MixedPrecision().reduce_dtype(reduce)));
      for (int step = 0; step < 3; ++step) {
        const auto before = root.counters().reduce_scatters;
        loss(ours, step, rank.rank()).backward();
        ASSERT_EQ(root.counters().reduce_scatters, before + 3) << "one for each dtype";
        std::vector<torch::Tensor> sums(6);
        for (int r = 0; r < 2; ++r) {
          reference->zero_grad();
          loss(reference, step, r).backward();
          for (size_t i = 0; i < sums.size(); ++i) {
            const auto& gradient = reference->parameters()[i].grad();
            const auto part = gradient.to(reduce.value_or(gradient.scalar_type())) / 2;
            sums[i] = sums[i].defined() ? sums[i] + part : part;
          }
        }
        for (size_t i = 0; i < sums.size(); ++i) {
          auto parameter = reference->parameters()[i];
          parameter.mutable_grad() = sums[i].to(parameter.scalar_type());
        }
        assert_pieces(*ours, *reference, rank, c10::str("step ", step), {}, 2, assert_equal);
        for (auto* model : {&ours, &reference}) descend(**model, 0.02);
      }
    });
  }
}

TEST(ParameterDtypes, SomeAreKept) {
  for (const bool replicated : {false, true}) {
    for (const bool seen : {true, false}) {
      run_ranks(2, [&](Rank& rank) {
        const auto low = torch::kBFloat16;
        LowReference<Layers> reference(normed, {.param = low, .keeps = is_norm});
        auto ours = normed();
        const auto precision = with_kept_norms(low);
        if (replicated) {
          replicate(ours, on(rank).mixed_precision(precision));
        } else {
          auto root = fully_shard(ours, sharded_on(rank).mixed_precision(precision));
          root.unshard();
          ASSERT_EQ(ours->at<torch::nn::LinearImpl>(0).weight.scalar_type(), low);
          ASSERT_EQ(ours->at<torch::nn::LayerNormImpl>(1).weight.scalar_type(), torch::kFloat);
          root.reshard();
        }
        // By a direct call no argument is cast to another dtype than it would be by one that is seen.
        const LowLoss<Layers> loss = [&](Layers& model, int step, int r, std::optional<at::ScalarType> cast) {
          const auto x = cast_to(batch(step, r, 6), cast);
          const auto y = seen && !cast ? call(*model, x) : model->forward(x);
          return y.to(torch::kFloat).pow(2).mean();
        };
        train_low<Layers>(rank, ours, reference, loss, replicated ? 1 : 2);
      });
    }
  }
}

TEST(ParameterDtypes, InAPlanAndInAnEstimate) {
  run_ranks(2, [](Rank& rank) {
    const auto plain = policy({});
    const auto kept = with_kept_norms(torch::kBFloat16);
    // Wide, so that it is not lost where parts are rounded up.
    Layers ours(torch::nn::Linear(6, 512), torch::nn::LayerNorm(torch::nn::LayerNormOptions({512})));
    const auto peak = [&](const MixedPrecision& precision) {
      return estimate_memory(ours, sharded_on(rank).mixed_precision(precision), 2).forward_peak;
    };
    ASSERT_NE(peak(kept), peak(plain));
    const auto plan = fully_shard(ours, sharded_on(rank).mixed_precision(kept)).plan();
    std::vector<std::string> dtypes;
    for (const auto& group : plan.units[0].groups) dtypes.push_back(group.compute_dtype);
    ASSERT_EQ(dtypes, (std::vector<std::string>{"bfloat16", "float32"}));
  });
}

TEST(ParameterDtypes, AnotherDtypeIsRefused) {
  run_ranks(1, [](Rank& rank) {
    const auto precision = MixedPrecision()
                               .param_dtype(torch::kBFloat16)
                               .param_dtype_override([](const std::string&, const torch::Tensor&) {
                                 return std::optional(torch::kDouble);
                               });
    auto model = normed();
    const std::vector<std::string> parts{"param_dtype_override returned float64 for '0.weight'", "float32"};
    expect_error<ValueError>([&] { fully_shard(model, sharded_on(rank).mixed_precision(precision)); }, parts);
    expect_error<ValueError>([&] { replicate(model, on(rank).mixed_precision(precision)); }, parts);
  });
}

TEST(ParameterDtypes, GradientsOfAnotherDtype) {
  run_ranks(2, [](Rank& rank) {
    auto both = pair(rank, normed(), normed());
    auto mine = both.ours->parameters(), expected = both.reference->parameters();
    for (const auto& parameter : mine) parameter.set_grad_dtype(torch::kDouble);
    fully_shard(both.ours, sharded_on(rank));
    mine = both.ours->parameters();
    for (int step = 0; step < 3; ++step) {
      both.backward([](Layers& model, int s, int r) { return call(model, batch(s, r, 6)).pow(2).sum(); }, step);
      const torch::NoGradGuard guard;
      for (size_t i = 0; i < mine.size(); ++i) {
        ASSERT_EQ(mine[i].grad().scalar_type(), torch::kDouble);
        assert_close(mine[i].grad().to(torch::kFloat), piece_of(expected[i].grad(), rank), std::to_string(i));
        mine[i].sub_(0.05 * mine[i].grad());
        expected[i].sub_(0.05 * expected[i].grad());
      }
      assert_close(mine[0].detach(), piece_of(expected[0].detach(), rank), "values");
      both.each([](Layers& model) { model->zero_grad(); });
    }
  });
}

namespace {

/// A norm whose weight has a gradient that 16 bits do not hold.
struct NormedImpl : torch::nn::Module {
  NormedImpl() {
    weight = register_parameter("weight", torch::linspace(0.5, 2, 8));
  }
  torch::Tensor forward(const torch::Tensor& x) {
    return torch::rms_norm(x.to(weight.scalar_type()), {8}, weight);
  }
  torch::Tensor weight;
};
TORCH_MODULE(Normed);

} // namespace

TEST(ParameterDtypes, GradientsArriveAsComputed) {
  if (!base::kGradientsKeepTheirDtype) GTEST_SKIP() << "this torch's engine rounds gradients first";
  run_ranks(2, [](Rank& rank) {
    Normed ours;
    auto unit = fully_shard(ours, sharded_on(rank).mixed_precision(MixedPrecision().param_dtype(torch::kBFloat16)));
    for (int step = 0; step < 3; ++step) {
      auto expected = torch::zeros({8});
      for (int number = 0; number < 2; ++number) {
        unit.set_requires_gradient_sync(number == 1);
        const auto input = [&](int r) { return batch(2 * step + number, r, 8); };
        call(ours, input(rank.rank())).to(torch::kFloat).pow(2).sum().backward();
        for (int r = 0; r < rank.world_size(); ++r) {
          // Asked for alone, a gradient is not cast either.
          auto weight = torch::linspace(0.5, 2, 8).to(torch::kBFloat16).requires_grad_();
          weight.set_grad_dtype(std::nullopt);
          const auto out = torch::rms_norm(input(r).to(torch::kBFloat16), {8}, weight);
          out.to(torch::kFloat).pow(2).sum().backward();
          ASSERT_EQ(weight.grad().scalar_type(), torch::kFloat);
          ASSERT_FALSE(weight.grad().to(torch::kBFloat16).to(torch::kFloat).equal(weight.grad()));
          expected += weight.grad() / rank.world_size();
        }
      }
      ASSERT_LT(
          (ours->parameters()[0].grad() - piece_of(expected, rank)).abs().max().item<float>(),
          1e-5 * expected.abs().max().item<float>());
      ours->zero_grad();
    }
  });
}

} // namespace shardwise::test::parameter_dtypes
