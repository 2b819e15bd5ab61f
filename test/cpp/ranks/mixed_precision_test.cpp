// Mixed precision, against one process that rounds, computes and sums by hand. Two ranks: every bit is compared.
#include "ranks/mixed_precision_models.h"
#include "support/expect.h"

#include <torch/csrc/autograd/forward_grad.h>
#include <cmath>

namespace shardwise::test {
namespace {

constexpr auto kLow = torch::kBFloat16;

Layers make_layers() {
  Layers layers(
      torch::nn::Linear(6, 9), torch::nn::LayerNorm(torch::nn::LayerNormOptions({9})), torch::nn::Tanh(),
      torch::nn::Linear(9, 3));
  fill(*layers);
  return layers;
}

/// Calls of the parts that no hook sees.
struct DirectImpl : torch::nn::Module {
  DirectImpl() {
    fill(*this);
  }
  torch::Tensor forward(const torch::Tensor& tokens, const torch::Tensor& x) {
    auto y = embedding->forward(tokens) + torch::tanh(linear->forward(x));
    y = norm->forward(y);
    auto [z, state] = lstm->forward(y.unsqueeze(1));
    return torch::nn::functional::linear(z.squeeze(1), head->weight);
  }
  torch::nn::Embedding embedding = register_module("embedding", torch::nn::Embedding(7, 5));
  torch::nn::Linear linear = register_module("linear", torch::nn::Linear(6, 5));
  torch::nn::LayerNorm norm = register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({5})));
  torch::nn::LSTM lstm = register_module("lstm", torch::nn::LSTM(5, 4));
  torch::nn::Linear head = register_module("head", torch::nn::Linear(torch::nn::LinearOptions(4, 3).bias(false)));
};
TORCH_MODULE(Direct);

torch::Tensor direct_loss(Direct& model, int step, int rank, std::optional<at::ScalarType> cast) {
  const auto tokens = torch::randint(0, 7, {5}, generator(77 * step + rank));
  return model->forward(tokens, cast_to(batch(step, rank, 6), cast)).to(torch::kFloat).pow(2).mean();
}

} // namespace

TEST(FullyShardMixedPrecision, ParityWithRoundingByHand) {
  // R04, R05: sums and divisors of our own, in the dtype that the policy says.
  const std::vector<Precision> precisions{
      {},
      {.reduce = kLow},
      {.param = torch::kHalf, .reduce = torch::kFloat},
      {.param = torch::kFloat, .reduce = kLow},
      {.factor = 3},
      {.factor = 1, .divide_after = true},
      {.divide_after = true}};
  for (const auto& precision : precisions) {
    for (const bool reshard : {true, false}) {
      SCOPED_TRACE(c10::str(
          precision.param, ", summed in ", precision.reduce, ", divided by ", precision.factor,
          precision.divide_after ? " after" : "", ", reshard ", reshard));
      run_ranks(2, [&](Rank& rank) {
        LowReference<Layers> reference(make_layers, precision);
        auto ours = make_layers();
        const auto options = sharded_on(rank).mixed_precision(policy(precision)).reshard_after_forward(reshard);
        std::vector<Unit> units{fully_shard(ours->ptr(0), options), fully_shard(ours, options)};
        for (auto& unit : units) {
          if (precision.factor > 0) unit.set_gradient_divide_factor(precision.factor);
          unit.set_force_sum_reduction(precision.divide_after);
        }
        train_low<Layers>(rank, ours, reference, layers_loss, 2);
      });
    }
  }
}

TEST(FullyShardMixedPrecision, SumsAreInTheParametersDtypeIfNoneIsNamed) {
  for (const bool synchronised : {true, false}) {
    run_ranks(2, [&](Rank& rank) {
      LowReference<Layers> reference(make_layers, {.param = kLow, .reduce = torch::kFloat});
      auto ours = make_layers();
      auto unit = fully_shard(ours, sharded_on(rank).mixed_precision(MixedPrecision().param_dtype(kLow)));
      ASSERT_EQ(unit.plan().units.at(0).groups.at(0).reduce_dtype, "float32");
      const auto before = [&](bool last) { unit.set_requires_gradient_sync(synchronised || last); };
      train_low<Layers>(rank, ours, reference, layers_loss, 2, synchronised ? 1 : 3, before);
    });
  }
}

TEST(FullyShardMixedPrecision, HalfIsDividedInTwoParts) {
  // R08. 8 ranks: by 4 before the sum and by 2 after it. Divided after it alone, the sum of the first is infinite;
  // before it alone, the second loses bits: an eighth of 20 times the smallest number of half precision is none of its
  // numbers.
  for (const double value : {30000.0, std::ldexp(20.0, -24)}) {
    run_ranks(8, [&](Rank& rank) {
      torch::nn::Linear model(torch::nn::LinearOptions(1, 8).bias(false));
      fully_shard(
          model,
          sharded_on(rank).mixed_precision(MixedPrecision().param_dtype(torch::kHalf).reduce_dtype(torch::kHalf)));
      call(model, torch::full({1, 1}, value)).sum().backward();
      const auto expected = torch::full({1, 1}, value).to(torch::kHalf).to(torch::kFloat);
      ASSERT_TRUE(torch::allclose(model->parameters()[0].grad(), expected, 2e-2, 0)) << model->parameters()[0].grad();
    });
  }
}

TEST(FullyShardMixedPrecision, FlatLayout) {
  run_ranks(2, [](Rank& rank) {
    // The bits of the layout `rows`.
    auto flat = make_layers(), rows = make_layers();
    const auto options = sharded_on(rank).mixed_precision(policy({}));
    fully_shard(rows, options);
    fully_shard(flat, FullyShardOptions(options).layout(ShardLayout::flat));
    for (int step = 0; step < 4; ++step) {
      for (auto* model : {&rows, &flat}) {
        layers_loss(*model, step, rank.rank(), std::nullopt).backward();
        descend(**model, 0.1);
      }
      const auto expected = full_state_dict(*rows), found = full_state_dict(*flat);
      for (const auto& item : expected) assert_equal(found[item.key()], item.value(), item.key());
    }
  });
}

TEST(FullyShardMixedPrecision, FirstUsedInTheLastMicrobatch) {
  // R06: fresh gradients in 16 bits beside sums in 32.
  run_ranks(2, [](Rank& rank) {
    const LowLoss<Branches> loss = [](Branches& model, int number, int r, std::optional<at::ScalarType> cast) {
      const std::vector<std::string> use =
          number % 3 == 2 ? std::vector<std::string>{"left"} : std::vector<std::string>{};
      return model->forward(cast_to(batch(number, r, 3), cast), use).to(torch::kFloat).pow(2).sum();
    };
    LowReference<Branches> reference([] { return Branches(); }, {});
    Branches ours;
    auto root = fully_shard(ours, sharded_on(rank).mixed_precision(policy({})));
    train_low<Branches>(rank, ours, reference, loss, 2, 3, [&](bool last) { root.set_requires_gradient_sync(last); });
  });
}

TEST(FullyShardMixedPrecision, HybridAndReplicate) {
  run_ranks(2, [&](Rank& rank) {
    LowReference<Layers> reference(make_layers, {});
    auto ours = make_layers();
    const auto options = on(rank).mixed_precision(policy({}));
    replicate(ours->ptr(0), options);
    const auto root = replicate(ours, options);
    train_low<Layers>(rank, ours, reference, layers_loss, 1);
    ASSERT_EQ(root.counters().all_gathers, 2 * 1) << "comparisons of the wrapped modules alone";
  });
  run_ranks(4, [](Rank& rank) {
    LowReference<Layers> reference(make_layers, {});
    auto ours = make_layers();
    fully_shard(ours, hybrid_on(rank, {2, 2}).mixed_precision(policy({})));
    for (int step = 0; step < 3; ++step) {
      layers_loss(ours, step, rank.rank(), std::nullopt).backward();
      reference.backward(rank, layers_loss, {step});
    }
    assert_pieces(*ours, *reference.model, rank, "three backwards", {}, 2);
  });
}

TEST(FullyShardMixedPrecision, ReplicatedSumsInLowPrecisionAlone) {
  // Without another dtype to compute in there is one tensor, as ever; only the bucket is of another dtype.
  run_ranks(2, [](Rank& rank) {
    const Precision precision{.param = torch::kFloat, .reduce = kLow};
    LowReference<Layers> reference(make_layers, precision);
    auto ours = make_layers();
    const auto before = ours->parameters();
    replicate(ours, on(rank).mixed_precision(MixedPrecision().reduce_dtype(kLow)));
    for (size_t i = 0; i < before.size(); ++i) ASSERT_TRUE(ours->parameters()[i].is_same(before[i]));
    train_low<Layers>(rank, ours, reference, layers_loss, 1);
  });
}

TEST(ReplicateMixedPrecision, InputJvp) {
  // The derivative of the outputs in a direction of the inputs, and its gradients. (torch has none for norms.)
  const auto make = [] {
    Layers layers(torch::nn::Linear(6, 9), torch::nn::Tanh(), torch::nn::Linear(9, 3));
    fill(*layers);
    return layers;
  };
  const auto level = torch::autograd::ForwardADLevel::get_next_idx();
  for (const Precision& precision : {Precision{.param = torch::kFloat}, Precision{}}) {
    for (const bool seen : {true, false}) {
      run_ranks(2, [&](Rank& rank) {
        const LowLoss<Layers> loss = [&](Layers& model, int step, int r, std::optional<at::ScalarType> cast) {
          const auto dual =
              at::_make_dual(cast_to(batch(step, r, 6), cast), cast_to(batch(step + 50, r, 6), cast), level);
          const auto out = seen ? call(*model, dual) : model->forward(dual);
          const auto [value, tangent] = at::_unpack_dual(out, level);
          EXPECT_TRUE(tangent.defined()) << rank.name();
          return value.to(torch::kFloat).pow(2).mean() + tangent.to(torch::kFloat).pow(2).mean();
        };
        LowReference<Layers> reference(make, precision);
        auto ours = make();
        replicate(ours, on(rank).mixed_precision(policy(precision)));
        train_low<Layers>(rank, ours, reference, loss, 1);
      });
    }
  }
  torch::autograd::ForwardADLevel::release_idx(level);
}

TEST(FullyShardMixedPrecision, DirectCallsAreCastByOperation) {
  // T09, T36: nothing here is seen by a hook.
  for (const bool checkpointed : {false, true}) {
    run_ranks(2, [&](Rank& rank) {
      const LowLoss<Direct> loss = [&](Direct& model, int step, int r, std::optional<at::ScalarType> cast) {
        if (!checkpointed || cast) return direct_loss(model, step, r, cast);
        const auto tokens = torch::randint(0, 7, {5}, generator(77 * step + r));
        const auto run = [model, tokens](const torch::Tensor& x) mutable { return model->forward(tokens, x); };
        return activation_checkpoint(run, batch(step, r, 6)).to(torch::kFloat).pow(2).mean();
      };
      LowReference<Direct> reference([] { return Direct(); }, {});
      Direct ours;
      const auto options = sharded_on(rank).mixed_precision(policy({}));
      fully_shard(ours->linear, options);
      fully_shard(ours->norm, options);
      fully_shard(ours, options);
      train_low<Direct>(rank, ours, reference, loss, 2);
    });
  }
}

namespace {

struct OffsetImpl : torch::nn::Module {
  torch::Tensor forward() {
    return weight + offset;
  }
  torch::Tensor weight = register_parameter("weight", torch::ones({4}));
  torch::Tensor offset = register_buffer("offset", torch::full({4}, 0.001));
};
TORCH_MODULE(Offset);

} // namespace

TEST(FullyShardMixedPrecision, BuffersAndWhatIsWrittenStay) {
  run_ranks(2, [](Rank& rank) {
    Offset model;
    fully_shard(model, sharded_on(rank).mixed_precision(policy({})));
    const auto sum_with_buffer = model->forward();
    ASSERT_EQ(sum_with_buffer.dtype(), torch::kFloat);
    ASSERT_TRUE(torch::equal(sum_with_buffer, torch::full({4}, 1.001)));
    ASSERT_EQ((model->weight + model->offset.clone()).dtype(), kLow);
    // An argument that is written to keeps its dtype: what the operation does to it is the program's own affair.
    auto sum = torch::zeros({4});
    sum.add_(model->weight);
    ASSERT_EQ(sum.dtype(), torch::kFloat);
    ASSERT_TRUE(torch::equal(sum, torch::ones({4})));
  });
}

namespace {

/// Does not care about the dtype of its input.
struct ScaleImpl : torch::nn::Module {
  torch::Tensor forward(const torch::Tensor& x) {
    return (x.to(torch::kFloat) + 0.001) * weight;
  }
  torch::Tensor weight = register_parameter("weight", torch::full({3}, 1.5));
};
TORCH_MODULE(Scale);

} // namespace

TEST(FullyShardMixedPrecision, VisibleCallsAreCastAtTheModuleAlone) {
  run_ranks(2, [](Rank& rank) {
    torch::nn::Sequential layers{Scale()};
    Scale direct;
    const auto options = sharded_on(rank).mixed_precision(MixedPrecision().param_dtype(kLow));
    fully_shard(layers->ptr(0), options);
    fully_shard(layers, options);
    fully_shard(direct, options);
    const auto x = batch(0, rank.rank(), 3);
    // What the module itself does in float stays so, its input was rounded; a direct call is cast where it multiplies.
    const auto seen = layers->forward(x);
    ASSERT_EQ(seen.dtype(), torch::kFloat);
    ASSERT_TRUE(torch::equal(seen, (x.to(kLow).to(torch::kFloat) + 0.001) * 1.5));
    const auto unseen = direct->forward(x);
    ASSERT_EQ(unseen.dtype(), kLow);
    ASSERT_TRUE(torch::equal(unseen, (x + 0.001).to(kLow) * torch::full({3}, 1.5).to(kLow)));
    // A call that fails leaves no trace: the next direct one is cast again.
    ASSERT_THROW(layers->forward(torch::zeros({2, 4})), c10::Error);
    ASSERT_EQ(layers->ptr<ScaleImpl>(0)->forward(x).dtype(), kLow);
    register_forward_hook(*layers->ptr(0), [](torch::nn::Module&, HookTensors&) { throw std::runtime_error("mine"); });
    ASSERT_THROW(layers->forward(x), std::runtime_error);
    ASSERT_EQ(layers->ptr<ScaleImpl>(0)->forward(x).dtype(), kLow);
  });
}

TEST(FullyShardMixedPrecision, InputsAndOutputs) {
  run_ranks(2, [](Rank& rank) {
    auto ours = make_layers();
    auto options = sharded_on(rank);
    fully_shard(ours, options.mixed_precision(MixedPrecision().param_dtype(kLow).output_dtype(torch::kDouble)));
    const auto x = batch(0, rank.rank(), 6);
    ASSERT_EQ(call(*ours, x).dtype(), torch::kDouble);
    ASSERT_EQ(ours->forward(x).dtype(), kLow) << "a direct call has no end that can be seen";
    auto uncast = make_layers();
    fully_shard(uncast, options.mixed_precision(MixedPrecision().param_dtype(kLow).cast_forward_inputs(false)));
    ASSERT_ANY_THROW(uncast->forward(x));
    ASSERT_EQ(uncast->forward(x.to(kLow)).dtype(), kLow);
    ASSERT_EQ(call(*uncast, x.to(kLow)).dtype(), kLow);
    // What is not a floating-point number is not cast.
    torch::nn::Embedding embedding(5, 3);
    fully_shard(embedding, options.mixed_precision(MixedPrecision().param_dtype(kLow)));
    ASSERT_EQ(call(embedding, torch::arange(4)).dtype(), kLow);
  });
}

TEST(FullyShardMixedPrecision, FrozenFirst) {
  run_ranks(2, [](Rank& rank) {
    LowReference<Layers> reference(make_layers, {});
    auto ours = make_layers();
    fully_shard(ours, sharded_on(rank).mixed_precision(policy({})));
    const auto set = [&](bool trained) {
      for (auto* model : {&ours, &reference.model}) set_trained(*(*model)->ptr(0), trained);
    };
    set(false);
    layers_loss(ours, 0, rank.rank(), std::nullopt).backward();
    for (auto& parameter : ours->parameters()) parameter.mutable_grad() = torch::Tensor();
    set(true);
    train_low<Layers>(rank, ours, reference, layers_loss, 2);
  });
}

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
      replicate(ours, on(rank).mixed_precision(MixedPrecision().param_dtype(kCast)));
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

TEST(LeafGradients, AddedByHand) {
  run_ranks(2, [](Rank& rank) {
    using Linear = torch::nn::Linear;
    const auto make = [] {
      Linear model(6, 4);
      fill(*model);
      return model;
    };
    const LowLoss<Linear> loss = [](Linear& model, int step, int r, std::optional<at::ScalarType> cast) {
      return call(model, cast_to(batch(step, r, 6), cast)).pow(2).sum();
    };
    auto model = make();
    auto unit = fully_shard(model, sharded_on(rank).mixed_precision(policy({})));
    unit.set_reshard_after_backward(false);
    unit.set_requires_gradient_sync(false);
    for (int part = 0; part < 7; ++part) {
      auto& leaf = model->weight;
      const auto found = torch::autograd::grad({loss(model, part, rank.rank(), std::nullopt)}, {leaf})[0];
      leaf.mutable_grad() = leaf.grad().defined() ? leaf.grad() + found : found;
    }
    unit.set_requires_gradient_sync(true);
    loss(model, 7, rank.rank(), std::nullopt).backward();
    LowReference<Linear> reference(make, {});
    reference.backward(rank, loss, {0, 1, 2, 3, 4, 5, 6, 7});
    const auto& mine = model->parameters()[0].grad();
    ASSERT_TRUE(mine.defined());
    const auto expected = piece_of(reference.model->weight.grad(), rank);
    EXPECT_TRUE(torch::allclose(mine, expected, 1e-6, 1e-5)) << mine << expected;
  });
}

} // namespace shardwise::test
