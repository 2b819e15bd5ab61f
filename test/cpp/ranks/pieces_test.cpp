// Code over parameters() that is right on whole parameters: right on shards, or an Error.
#include "ranks/fully_shard_models.h"
#include "support/expect.h"

namespace shardwise::test::pieces {
namespace {

using torch::Tensor;

torch::nn::Linear linear(int64_t in = 5, int64_t out = 6) {
  torch::nn::Linear model(in, out);
  fill(*model);
  return model;
}

/// The index of the first row or column, where `tensor` is.
Tensor first_of(const Tensor& tensor) {
  return torch::zeros({1}, tensor.options().dtype(torch::kLong));
}

/// Something done to the weight, in parameters() or the like.
using Act = std::function<void(Tensor)>;

void expect_refused(
    const std::vector<Act>& acts, const std::string& part,
    const std::vector<ShardLayout>& layouts = {ShardLayout::rows, ShardLayout::flat}) {
  for (const auto layout : layouts) {
    run_ranks(2, [&](Rank& rank) {
      auto ours = linear();
      fully_shard(ours, sharded_on(rank).layout(layout));
      const auto before = full_state_dict(ours);
      for (size_t i = 0; i < acts.size(); ++i) {
        SCOPED_TRACE(i);
        for (int twice = 0; twice < 2; ++twice) {
          expect_error<std::exception>([&] { acts[i](ours->parameters()[0]); }, {part});
        }
      }
      const auto after = full_state_dict(ours);
      EXPECT_TRUE(before["weight"].equal(after["weight"]));
    });
  }
}

void expect_refused(
    const Act& act, const std::string& part,
    const std::vector<ShardLayout>& layouts = {ShardLayout::rows, ShardLayout::flat}) {
  expect_refused(std::vector<Act>{act}, part, layouts);
}

Act without_gradients(const Act& act) {
  return [act](Tensor p) {
    const torch::NoGradGuard guard;
    act(std::move(p));
  };
}

std::vector<Act> without_gradients(std::vector<Act> acts) {
  for (auto& act : acts) act = without_gradients(act);
  return acts;
}

/// Done to shards it has the effect that it has on the whole parameter.
void expect_right(const Act& act, int world = 2) {
  run_ranks(world, [&](Rank& rank) {
    Pair<torch::nn::Linear> both{rank, linear(), linear()};
    fully_shard(both.ours, sharded_on(rank));
    for (int times = 0; times < 3; ++times) {
      both.each([&](torch::nn::Linear& model) { without_gradients(act)(model->parameters()[0]); });
      both.check("shards");
    }
  });
}

} // namespace

TEST(Pieces, NumbersOfOneRanksWeightsChangeNone) {
  const std::vector<Act> acts{
      [](Tensor p) { p.mul_(2 / p.norm()); }, [](Tensor p) { p.sub_(p.mean()); },
      [](Tensor p) { p.div_(p.abs().max()); }};
  expect_refused(without_gradients(acts), "computed from this rank's shards alone");
  // What is computed element by element is right.
  expect_right([](Tensor p) {
    p.mul_(0.5).add_(p, 2).clamp_(-1, 1);
    p.select(1, 2).zero_();
    p.view({-1}).add_(1);
  });
}

// What differs between ranks is followed through other operations, to the write.
TEST(Pieces, WhatMixesRowsChangesNone) {
  constexpr auto kText = "computed from this rank's shards alone";
  const auto once_more = [](const Tensor& p) { return p.detach().clone(); };
  const std::vector<Act> by_rows{
      [](Tensor p) { p.copy_(p.flip(0)); },
      [](Tensor p) { p.copy_(std::get<0>(p.sort(0))); },
      [](Tensor p) { p.copy_(p.cumsum(0)); },
      [](Tensor p) { p.sub_(p.mean(0)); },
      [](Tensor p) { p.mul_(p.softmax(-2)); },
      [](Tensor p) { p.add_(p[0]); },
      [](Tensor p) { p.add_(p.pow(2)[0]); },
      [](Tensor p) { p.add_(p.diagonal()[0]); },
      [](Tensor p) { p.copy_(p.mm(p.t().mm(p))); },
      [](Tensor p) { p.add_(p.index_select(0, first_of(p))); },
      [](Tensor p) { p.add_(p.index({first_of(p)})); },
      [&](Tensor p) { p.sub_(once_more(p).pow(2).mean(0)); }};
  expect_refused(without_gradients(by_rows), kText, {ShardLayout::rows});
  const std::vector<Act> at_all{
      [](Tensor p) { p.mul_(p > p.mean()); },
      [](Tensor p) { p.masked_fill_(p.abs() < p.abs().mean(), 0); },
      [](Tensor p) { p.copy_(torch::where(p > std::get<0>(p.flatten().kthvalue(2)), p, torch::zeros({}))); },
      [](Tensor p) { p.div_(p.pow(2).sum().sqrt()); },
      [&](Tensor p) { p.div_(once_more(p).norm()); },
      [](Tensor p) { p.copy_(torch::roll(p, 1)); },
      [](Tensor p) { p.copy_(p.flatten().cumsum(0).view_as(p.clone())); }};
  expect_refused(without_gradients(at_all), kText);
  expect_refused(without_gradients([](Tensor p) { p.cumsum_(0); }), "by their place in it");
  expect_refused(
      without_gradients([](Tensor p) { p.renorm_(2, 1, 0.1); }), "by their place in it", {ShardLayout::rows});
}

TEST(Pieces, RowsByThemselvesAreRight) {
  expect_right([](Tensor p) {
    const auto turn = std::get<0>(torch::linalg_qr(torch::ones({5, 5}).tril()));
    p.div_(p.norm(2, 1, true).clamp_min(0.5)).renorm_(2, 0, 0.7);
    p.sub_(p.mean(1, true)).mul_(p.softmax(1) + (p > 0)).add_(p.flip(1), 0.1).addcmul_(p, p.cumsum(-1), 0.1);
    p.copy_(p.mm(turn) + p.index_select(1, first_of(p)) * p.abs().pow(2).sum(1, true).sqrt());
  });
}

TEST(Pieces, TheCutDimensionCounts) {
  run_ranks(2, [](Rank& rank) {
    auto ours = linear(), reference = linear();
    fully_shard(
        ours, sharded_on(rank).shard_placement([](const std::string&, const Tensor& p) { return p.dim() - 1; }));
    const torch::NoGradGuard guard;
    const auto p = ours->parameters()[0];
    expect_error<Error>([&] { p.select(1, 0).zero_(); }, {"some rows of it"});
    expect_error<Error>([&] { p.sub_(p.mean(1, true)); }, {"computed from this rank's shards alone"});
    for (auto* model : {&ours, &reference}) {
      auto weight = (*model)->parameters()[0];
      weight.sub_(weight.mean(0)).select(0, 1).zero_();
    }
    assert_pieces(*ours, *reference, rank, "row by row", {{"weight", 1}});
  });
}

TEST(Pieces, OneRankHasTheWhole) {
  expect_right([](Tensor p) { p.mul_(2 / p.norm()).sub_(p.mean()); }, 1);
}

TEST(Pieces, NoRandomNumbers) {
  constexpr auto kText = "every rank would draw numbers for its own piece";
  expect_refused([](Tensor p) { torch::nn::init::xavier_uniform_(p); }, kText, {ShardLayout::rows});
  expect_refused([](Tensor p) { torch::nn::init::normal_(p); }, kText);
  expect_refused(without_gradients([](Tensor p) { p.uniform_(-1, 1); }), kText);
}

TEST(Pieces, NoRowsAndNoWholeSizes) {
  expect_refused(
      without_gradients([](Tensor p) { p[0].zero_(); }), "it is about to write to some rows of it",
      {ShardLayout::rows});
  expect_refused(
      [](Tensor p) { torch::nn::utils::vector_to_parameters(torch::zeros({30}), {p}); }, "vector_to_parameters");
  const auto average = torch::zeros({6, 5});
  expect_refused(without_gradients([&](Tensor p) { average.clone().copy_(p); }), "those of the whole parameter");
  expect_refused(without_gradients([&](Tensor p) { average.clone().lerp_(p, 0.1); }), "those of the whole parameter");
  expect_refused(without_gradients([&](Tensor p) { p.add_(average.clone()); }), "those of the whole parameter");
}

TEST(Pieces, WritesByPlaceAreRefused) {
  const std::vector<Act> acts{
      [](Tensor p) { p.index_put_({first_of(p)}, 0); },
      [](Tensor p) { p.index_fill_(0, first_of(p), 0); },
      [](Tensor p) {
        p.index_add_(-2, first_of(p), torch::ones({1, 5}));
      },
      [](Tensor p) {
        p.scatter_(0, torch::zeros({1, 5}, torch::kLong), 3.0);
      },
      [](Tensor p) { p.fill_diagonal_(0); },
      [](Tensor p) { p.tril_(); },
      [](Tensor p) { torch::nn::init::eye_(p); }};
  expect_refused(without_gradients(acts), "by their place in it", {ShardLayout::rows});
  // Masks and columns are the same on pieces.
  expect_right([](Tensor p) {
    p.index_put_({p < 0.1}, 0).index_fill_(1, first_of(p), 2);
    p.index_put_({torch::indexing::Slice(), first_of(p)}, 3);
  });
}

TEST(Pieces, ShardsOfOneRowAreNotBroadcast) {
  run_ranks(2, [](Rank& rank) {
    torch::nn::Linear ours(5, 2);
    fully_shard(ours, sharded_on(rank));
    const torch::NoGradGuard guard;
    auto average = torch::zeros({2, 5});
    expect_error<Error>([&] { average.copy_(ours->parameters()[0]); }, {"those of the whole parameter"});
    EXPECT_EQ(average.abs().sum().item<float>(), 0);
  });
}

TEST(Pieces, PenaltiesAreSums) {
  constexpr auto kText = "A penalty may be a sum of elements";
  expect_refused([](Tensor p) { p.norm().backward(); }, kText);
  expect_refused([](Tensor p) { p.pow(2).mean().backward(); }, kText);
  expect_refused([](Tensor p) { p.pow(2).sum().sqrt().backward(); }, kText);
  expect_refused([](Tensor p) { torch::mse_loss(p, torch::zeros_like(p)).backward(); }, kText);
  const std::vector<Act> by_rows{
      [](Tensor p) { p.sum(0).pow(2).sum().backward(); }, [](Tensor p) { p.pow(2).sum(0).sqrt().sum().backward(); },
      [](Tensor p) { (p.t().mm(p) - torch::eye(5)).pow(2).sum().backward(); },
      [](Tensor p) {
        auto all = torch::zeros({});
        for (int i = 0; i < 2; ++i) all = all + p.pow(2).sum();
        all.sqrt().backward();
      }};
  expect_refused(by_rows, kText, {ShardLayout::rows});
}

// Sums of elements, norms of rows, and whatever the member says, which is whole.
TEST(Pieces, PenaltiesAreRight) {
  run_ranks(2, [](Rank& rank) {
    Pair<torch::nn::Linear> both{rank, linear(), linear()};
    fully_shard(both.ours, sharded_on(rank));
    const auto loss = [](torch::nn::Linear& model, int step, int r) {
      const auto p = model->parameters()[0];
      const auto penalty = p.abs().sum() * 0.1 + p.norm(2, 1).sum() + p.pow(2).sum(std::vector<int64_t>{0, 1});
      const auto value =
          model->forward(batch(step, r, 5)).pow(2).sum() + penalty + model->weight.norm() + model->weight.mean();
      EXPECT_GT(value.item<float>(), 0);
      return value;
    };
    for (int step = 0; step < 3; ++step) {
      both.backward(loss, step);
      both.check("penalties");
      both.each([](torch::nn::Linear& model) { descend(*model, 0.1); });
    }
    both.check("the end");
  });
}

TEST(Pieces, RowsOfGradientsAreRefused) {
  run_ranks(2, [](Rank& rank) {
    auto ours = linear();
    fully_shard(ours, sharded_on(rank));
    for (int step = 0; step < 2; ++step) {
      ours->forward(batch(step, rank.rank(), 5)).sum().backward();
      auto p = ours->parameters()[0];
      auto gradient = p.mutable_grad();
      const auto before = gradient.clone();
      constexpr auto kText = "got the gradient of the shard of 'weight'";
      expect_error<Error>([&] { gradient[0].zero_(); }, {kText, "some rows of it"});
      expect_error<Error>([&] { gradient.tril_(); }, {kText, "by their place in it"});
      const torch::NoGradGuard guard;
      constexpr auto kMixed = "computed from this rank's shards alone";
      expect_error<Error>([&] { gradient.sub_(gradient.mean(0)); }, {kMixed});
      expect_error<Error>([&] { p.sub_(gradient.mm(gradient.t()).mm(gradient)); }, {kMixed});
      EXPECT_TRUE(before.equal(gradient));
      gradient.sub_(gradient.mean(1, true)).select(1, 0).zero_();
    }
  });
}

TEST(Pieces, HooksGetTheMean) {
  for (const auto layout : {ShardLayout::rows, ShardLayout::flat}) {
    run_ranks(2, [&](Rank& rank) {
      Pair<torch::nn::Linear> both{rank, linear(), linear()};
      auto& ours = both.ours;
      auto& reference = both.reference;
      fully_shard(ours, sharded_on(rank).layout(layout));
      int calls = 0;
      const auto clamp = [&calls](const Tensor& gradient) {
        ++calls;
        return gradient.clamp(-0.5, 0.5);
      };
      ours->parameters()[0].register_hook(clamp);
      const auto removed = ours->parameters()[0].register_hook([](const Tensor& gradient) { return gradient * 0; });
      ours->parameters()[0].remove_hook(removed);
      const auto loss = [](torch::nn::Linear& model, int step, int r) {
        return model->forward(batch(step, r, 5)).pow(2).sum();
      };
      for (int step = 0; step < 3; ++step) {
        both.backward(loss, step);
        EXPECT_GT(reference->weight.grad().abs().max().item<float>(), 0.5);
        reference->weight.mutable_grad().clamp_(-0.5, 0.5);
        both.each([](torch::nn::Linear& model) { descend(*model, 0.1); });
        EXPECT_EQ(calls, step + 1);
        assert_close(full_state_dict(ours)["weight"], reference->weight.detach(), "clamped");
      }
      ours->parameters()[1].register_hook([](const Tensor& gradient) { return gradient.new_zeros({17}); });
      expect_error<Error>(
          [&] { ours->forward(batch(0, rank.rank(), 5)).sum().backward(); },
          {"a hook on the shard of 'bias' changed the sizes of the gradient"});
    });
  }
}

TEST(Pieces, KnowTheSizesOfTheWhole) {
  for (const auto layout : {ShardLayout::rows, ShardLayout::flat}) {
    run_ranks(2, [&](Rank& rank) {
      auto ours = linear();
      fully_shard(ours, sharded_on(rank).layout(layout));
      const auto parameters = ours->parameters();
      EXPECT_EQ(whole_sizes(parameters[0]), (std::vector<int64_t>{6, 5}));
      EXPECT_EQ(whole_sizes(parameters[1]), std::vector<int64_t>{6});
    });
  }
  EXPECT_EQ(whole_sizes(torch::ones({2, 3})), (std::vector<int64_t>{2, 3}));
}

// Whole, writable parameters.

TEST(WholeParameters, AreWrittenBack) {
  for (const auto layout : {ShardLayout::rows, ShardLayout::flat}) {
    for (const bool low : {false, true}) {
      run_ranks(2, [&](Rank& rank) {
        auto options = sharded_on(rank).layout(layout);
        if (low) options.mixed_precision(MixedPrecision().param_dtype(torch::kBFloat16));
        torch::nn::Sequential ours(linear(), linear(6, 4)), reference(linear(), linear(6, 4));
        fully_shard(*ours[0]->as<torch::nn::Linear>(), options);
        fully_shard(ours, options);
        const auto change = [&](torch::nn::Sequential& model) {
          const torch::NoGradGuard guard;
          auto& first = *model[0]->as<torch::nn::Linear>();
          EXPECT_TRUE(first.weight.is_same(model->parameters()[0]));
          first.weight.div_(first.weight.norm());
          first.weight[3].zero_();
          auto whole = torch::nn::utils::parameters_to_vector(model->parameters());
          EXPECT_EQ(whole.numel(), 64);
          torch::nn::utils::vector_to_parameters(whole.flip(0), model->parameters());
        };
        for (int step = 0; step < 3; ++step) {
          // Rank 0's values count.
          with_whole_parameters(ours, [&] {
            change(ours);
            if (rank.rank() > 0) ours->parameters()[1].detach().fill_(7);
          });
          change(reference);
          const auto values = full_state_dict(ours);
          for (const auto& named : reference->named_parameters()) {
            EXPECT_TRUE(values[named.key()].equal(named.value())) << named.key() << step;
          }
          const auto loss = [&](torch::nn::Sequential& model, int r) {
            return call(*model, batch(step, r, 5)).to(torch::kFloat).pow(2).sum();
          };
          EXPECT_FALSE(ours->parameters()[0].sizes() == reference->parameters()[0].sizes());
          if (low) continue;
          loss(ours, rank.rank()).backward();
          reference_backward(rank, [&](int r) { return loss(reference, r); });
          for (const auto& named : reference->named_parameters()) {
            const auto mine = ours->named_parameters()[named.key()].grad().reshape(-1);
            const auto theirs = piece_of(named.value().grad(), rank).reshape(-1);
            if (layout == ShardLayout::rows) assert_close(mine, theirs, named.key());
          }
          ours->zero_grad();
          reference->zero_grad();
        }
      });
    }
  }
}

TEST(WholeParameters, OfEveryWrapping) {
  const auto low = MixedPrecision().param_dtype(torch::kBFloat16);
  const std::vector<std::pair<std::string, std::function<void(torch::nn::Module&, Rank&)>>> wrappings{
      {"kept", [](auto& model, Rank& rank) { fully_shard(model, sharded_on(rank).reshard_after_forward(false)); }},
      {"offloaded", [](auto& model, Rank& rank) { fully_shard(model, sharded_on(rank).cpu_offload(CpuOffload())); }},
      {"hybrid",
       [](auto& model, Rank& rank) {
         fully_shard(model, FullyShardOptions().mesh(rank.mesh({{"copies", 2}, {"shards", 1}})));
       }},
      {"replicated", [](auto& model, Rank& rank) { replicate(model, on(rank)); }},
      {"replicated and cast", [&](auto& model, Rank& rank) { replicate(model, on(rank).mixed_precision(low)); }}};
  for (const auto& [name, wrap] : wrappings) {
    SCOPED_TRACE(name);
    run_ranks(2, [&](Rank& rank) {
      auto ours = linear(), reference = linear();
      wrap(*ours, rank);
      const auto change = [](torch::nn::Linear& model) {
        const torch::NoGradGuard guard;
        model->weight.div_(model->weight.norm());
        model->weight[3].zero_();
      };
      with_whole_parameters(ours, [&] { change(ours); });
      change(reference);
      EXPECT_TRUE(full_state_dict(ours)["weight"].equal(reference->weight));
      call(*ours, batch(0, rank.rank(), 5)).sum().backward();
    });
  }
}

TEST(WholeParameters, InitializeWhatWasOnMetaUnlessTheFunctionFails) {
  run_ranks(2, [](Rank& rank) {
    auto ours = on_meta([] { return torch::nn::Linear(5, 6); });
    fully_shard(ours, sharded_on(rank));
    to_empty(ours);
    const auto expect_values = [&] {
      const auto values = full_state_dict(ours);
      EXPECT_TRUE(values["weight"].equal(torch::ones({6, 5})));
      EXPECT_TRUE(values["bias"].equal(torch::zeros({6})));
    };
    // Rank 0's draws.
    with_whole_parameters(ours, [&] { torch::nn::init::constant_(ours->weight, rank.rank() + 1); });
    expect_values();
    EXPECT_ANY_THROW(with_whole_parameters(ours, [&] {
      const torch::NoGradGuard guard;
      ours->weight.zero_();
      if (rank.rank() == 1) throw std::runtime_error("on purpose");
    }));
    expect_values();
    EXPECT_EQ(ours->parameters()[0].size(0), 3);
    call(*ours, batch(0, rank.rank(), 5)).sum().backward();
  });
}

} // namespace shardwise::test::pieces
