// parallelize(): each rank along an axis has pieces of layers, and all compute what one process computes.
#include "ranks/split_models.h"
#include "support/expect.h"

#include <sstream>

namespace shardwise::test {
TEST(TensorParallel, ALayerNeedsAsManyCollectivesAsMegatron) {
  run_ranks(2, [](Rank& rank) {
    SplitBlock block(12, 8, 4);
    fill(*block);
    const auto layers = parallelize(
        block, rank.mesh({{"tp", 2}}), "tp",
        {{"attention.in", colwise().segments(3).heads(4)},
         {"attention.out", rowwise().heads(4)},
         {"up", colwise()},
         {"down", rowwise()}});
    const auto count = [&](const torch::Tensor& x, bool backward) {
      const auto before = layers.counters();
      const auto y = block(x);
      if (backward) y.sum().backward();
      const auto after = layers.counters();
      EXPECT_EQ(after.all_gathers, before.all_gathers);
      EXPECT_EQ(after.reduce_scatters, before.reduce_scatters);
      return after.all_reduces - before.all_reduces;
    };
    // One for attention and one for the MLP, forward and backward each.
    EXPECT_EQ(count(torch::randn({2, 3, 12}), false), 2);
    EXPECT_EQ(count(torch::randn({2, 3, 12}).requires_grad_(), true), 4);
    // Nobody asks for the gradient of the first layer's input.
    EXPECT_EQ(count(torch::randn({2, 3, 12}), true), 3);
  });
}

TEST(TensorParallel, TorchsAttentionAndEncoderLayer) {
  for (const int world : {2, 3}) {
    run_ranks(world, [&](Rank& rank) {
      const auto make = [] {
        torch::nn::TransformerEncoderLayer layer(
            torch::nn::TransformerEncoderLayerOptions(12, 3).dim_feedforward(10).dropout(0));
        fill(*layer);
        layer->to(torch::kDouble);
        return layer;
      };
      auto ours = make();
      auto reference = make();
      const auto whole = colwise().gather_output(true);
      parallelize(
          ours, rank.mesh({{"tp", world}}), "tp",
          {{"self_attn", whole},
           {"self_attn.out_proj", rowwise().split_input(true)},
           {"linear1", colwise()},
           {"linear2", rowwise()}});
      EXPECT_EQ(ours->self_attn->in_proj_weight.size(0), 3 * (rank.rank() < 12 / world ? 12 / world : 0));
      for (int step = 0; step < 3; ++step) {
        const auto x = torch::randn({4, 2, 12}, generator(step), torch::kDouble);
        const auto y = torch::randn({4, 2, 12}, generator(step + 50), torch::kDouble);
        // Queries that differ from keys and values take the weight apart.
        const auto loss = [&](auto& layer) {
          const auto crossed = std::get<0>(layer->self_attn->forward(x, y, y));
          return (layer->forward(x) + crossed).pow(2).mean();
        };
        const auto mine = loss(ours);
        const auto expected = loss(reference);
        ASSERT_TRUE(torch::allclose(mine, expected, 1e-10, 1e-12)) << mine << expected;
        mine.backward();
        expected.backward();
        const auto gathered = full_state_dict(ours);
        for (const auto& entry : reference->named_parameters()) {
          ASSERT_TRUE(torch::allclose(gathered[entry.key()], entry.value(), 1e-9, 1e-11)) << entry.key();
        }
        for (auto* layer : {&ours, &reference}) descend(**layer, 0.1);
      }
    });
  }
}

TEST(TensorParallel, ActivationsDividedAlongTheSequence) {
  for (const int64_t dim : {0, 1}) {
    run_ranks(2, [&](Rank& rank) {
      SplitBlock ours(12, 8, 4), reference(12, 8, 4);
      for (auto* block : {&ours, &reference}) {
        fill(**block);
        (*block)->to(torch::kDouble);
      }
      const auto mlp = [](SplitBlock& block, const torch::Tensor& x) {
        return x + block->down(torch::tanh(block->up(block->norm(x))));
      };
      const auto layers = parallelize(
          ours, rank.mesh({{"tp", 2}}), "tp",
          {{"norm", sequence()}, {"up", colwise().sequence_dim(dim)}, {"down", rowwise().sequence_dim(dim)}});
      for (int step = 0; step < 3; ++step) {
        const auto whole = torch::randn({4, 6, 12}, generator(step), torch::kDouble).requires_grad_();
        const auto part = whole.detach().chunk(2, dim)[rank.rank()].clone().requires_grad_();
        const auto before = layers.counters();
        mlp(ours, part).pow(2).sum().backward();
        const auto after = layers.counters();
        EXPECT_EQ(after.all_gathers - before.all_gathers, 2);
        EXPECT_EQ(after.reduce_scatters - before.reduce_scatters, 2);
        EXPECT_EQ(after.all_reduces - before.all_reduces, 3); // The norm's two parameters, and the bias of rowwise().
        mlp(reference, whole).pow(2).sum().backward();
        ASSERT_TRUE(torch::allclose(part.grad(), whole.grad().chunk(2, dim)[rank.rank()], 1e-10, 1e-12));
        const auto expected = reference->named_parameters();
        for (const auto& entry : ours->named_parameters()) {
          if (!entry.value().grad().defined()) continue;
          const auto& of = expected[entry.key()];
          const auto divided = entry.value().sizes() != of.sizes();
          const auto piece =
              divided ? of.grad().chunk(2, entry.key() == "down.weight" ? 1 : 0)[rank.rank()] : of.grad();
          ASSERT_TRUE(torch::allclose(entry.value().grad(), piece, 1e-9, 1e-11)) << entry.key();
        }
        for (auto* block : {&ours, &reference}) descend(**block, 0.01);
      }
      expect_error<ValueError>(
          [&] {
            ours->down(torch::randn({3, 3, 4}, torch::kDouble));
          },
          {"'down.weight'", "sequence_dim", "equal size"});
    });
  }
}

TEST(TensorParallel, PartsOfUnequalSizeAreAnErrorOnAllRanks) {
  // Over our transport. Gloo ends the process.
  run_ranks(2, [](Rank& rank) {
    torch::nn::Linear up(4, 8);
    parallelize(up, rank.mesh({{"tp", 2}}), "tp", {{"", colwise().sequence_dim(0)}});
    expect_error<Error>(
        [&] {
          up->forward(torch::ones({3 + rank.rank(), 4}));
        },
        {"the gather of the input of 'weight' along axis 'tp'", "all-gather of 12 elements", "of 16 elements"});
  });
}

// Programs take views of what a layer returned.
TEST(TensorParallel, OutputsLieInMemoryAsThoseOfOneProcess) {
  run_ranks(2, [](Rank& rank) {
    const auto mesh = rank.mesh({{"tp", 2}});
    torch::nn::Embedding table(10, 4);
    torch::nn::Linear up(4, 7);
    torch::nn::Linear down(7, 5);
    parallelize(table, mesh, "tp", {{"", vocabulary().sequence_dim(1)}});
    parallelize(up, mesh, "tp", {{"", colwise().sequence_dim(1).gather_output(true)}});
    parallelize(down, mesh, "tp", {{"", rowwise().sequence_dim(1).split_input(true)}});
    const auto part = table(torch::arange(24).remainder(10).view({4, 6}));
    const auto whole = up(part);
    const auto last = down(whole);
    for (const auto& output : {part, whole, last}) EXPECT_TRUE(output.is_contiguous()) << output.strides();
    EXPECT_EQ(part.sizes(), torch::IntArrayRef({4, 3, 4}));
    EXPECT_EQ(whole.view({24, 7}).size(0), 24);
    EXPECT_EQ(last.view({12, 5}).size(0), 12);
  });
}

TEST(TensorParallel, WhatReadsAPieceAsIfItWereWholeIsAnError) {
  run_ranks(2, [](Rank& rank) {
    SplitBlock block(12, 8, 4);
    fill(*block);
    parallelize(block, rank.mesh({{"tp", 2}}), "tp", {{"up", colwise()}, {"down", rowwise()}, {"raw.up", colwise()}});
    const auto x = torch::randn({2, 12});
    const auto& weight = block->up->weight;
    const auto refuses = [&](const std::function<void()>& act, const std::string& operation) {
      expect_error<Error>(act, {"rank", operation, "'up.weight'", "[4, 12] of [8, 12]", "axis 'tp'"});
    };
    refuses([&] { weight.norm(); }, "norm");
    refuses([&] { torch::einsum("bi,oi->bo", {x, weight}); }, "aten::einsum");
    refuses([&] { torch::cat({weight, weight}); }, "aten::cat");
    refuses([&] { torch::mm(weight, x.t()); }, "aten::mm");
    refuses([&] { torch::linear(x, weight, torch::randn({8})); }, "aten::linear");
    refuses([&] { torch::linear(torch::randn({2, 8}), weight); }, "aten::linear");
    expect_error<Error>(
        [&] { torch::linear(x.slice(1, 0, 8), block->down->weight); }, {"'down.weight'", "split_input"});
    {
      // As in evaluation: nothing that a forward may do is taken for something else.
      const torch::NoGradGuard no_grad;
      refuses([&] { torch::einsum("bi,oi->bo", {x, weight}); }, "aten::einsum");
      // But what an optimizer or an average does is.
      EXPECT_EQ(weight.clone().add_(weight).sizes(), weight.sizes());
      EXPECT_TRUE(torch::allclose(torch::linear(x, weight), torch::linear(x, weight.detach())));
    }
    {
      const torch::InferenceMode inference;
      EXPECT_EQ(torch::mm(x, weight.t()).size(1), 4);
    }
    expect_error<Error>([&] { block->up->clone(); }, {"'up.weight'", "cloned"});
    expect_error<ValueError>([&] { block->up->weight.set_data(torch::zeros({8, 12})); }, {"load_full_state_dict"});
    const auto y = block->up(x).sum();
    expect_error<Error>(
        [&] { torch::autograd::grad({y}, {weight}, {}, true, /*create_graph=*/true); }, {"gradients of gradients"});
  });
}

TEST(TensorParallel, APieceStaysOneWhateverMemoryItGets) {
  run_ranks(2, [](Rank& rank) {
    torch::nn::Sequential ours(torch::nn::Linear(6, 8), torch::nn::Linear(8, 6));
    torch::nn::Sequential reference(torch::nn::Linear(6, 8), torch::nn::Linear(8, 6));
    fill(*ours);
    fill(*reference);
    parallelize(ours, rank.mesh({{"tp", 2}}), "tp", {{"0", colwise()}, {"1", rowwise()}});
    const auto x = torch::randn({3, 6}, generator(1), torch::kDouble);
    const auto check = [&](const std::string& what) {
      for (const bool with_gradients : {true, false}) {
        const torch::AutoGradMode mode(with_gradients);
        ASSERT_TRUE(torch::allclose(ours->forward(x), reference->forward(x), 1e-9, 1e-11)) << what;
      }
    };
    ours->to(torch::kDouble);
    reference->to(torch::kDouble);
    check("cast");
    std::stringstream archive;
    torch::save(ours, archive);
    {
      const torch::NoGradGuard no_grad;
      for (auto& parameter : ours->parameters()) parameter.zero_();
    }
    torch::load(ours, archive);
    check("loaded");
    const torch::NoGradGuard no_grad;
    const auto vector = torch::nn::utils::parameters_to_vector(ours->parameters());
    torch::nn::utils::vector_to_parameters(vector, ours->parameters());
    check("in one vector");
  });
}

TEST(TensorParallel, APlanThatDoesNotFitIsAnErrorOnAllRanks) {
  run_ranks(2, [](Rank& rank) {
    const auto mesh = rank.mesh({{"tp", 2}});
    const auto refuses = [&](const SplitPlan& plan, const std::vector<std::string>& parts) {
      SplitModel model(10, 7, 3, 1);
      expect_error<ValueError>([&] { parallelize(model, mesh, "tp", plan); }, parts);
      EXPECT_EQ(model->table->weight.size(0), 10);
    };
    refuses({{"blocks.*.upp", colwise()}}, {"'blocks.*.upp'", "fits no module", "table.weight"});
    refuses({{"blocks.0.attention.in", colwise().segments(3).heads(3)}}, {"'blocks.0.attention.in.weight'", "3 heads"});
    refuses({{"blocks.0.attention.in", colwise().segments(5)}}, {"36 places", "5 segments"});
    refuses({{"blocks.0.norm", colwise()}}, {"'blocks.0.norm'", "LayerNorm", "colwise()"});
    refuses({{"table", rowwise()}}, {"'table'", "Embedding", "vocabulary()"});
    refuses({{"table", vocabulary()}, {"head", rowwise()}}, {"'table.weight' and 'head.weight' are one parameter"});
    refuses({{"blocks.0.raw.up_bias", rowwise()}}, {"'blocks.0.raw.up_bias'", "bias of rowwise()"});
    // A rank with another plan.
    refuses({{rank.rank() == 0 ? "blocks.0.up" : "blocks.0.down", colwise()}}, {"divide different parameters"});
    SplitModel model;
    expect_error<ValueError>([&] { parallelize(model, mesh, "dp", split_plan(12)); }, {"no axis 'dp'"});
    const auto view = model->table->weight.detach();
    expect_error<ValueError>(
        [&] {
          parallelize(model, mesh, "tp", {{"table", vocabulary()}});
        },
        {"'table.weight'", "view"});
    SplitModel other;
    parallelize(other, mesh, "tp", {{"table", vocabulary()}});
    expect_error<ValueError>([&] { parallelize(other, mesh, "tp", {{"head", colwise()}}); }, {"divided already"});
    expect_error<Error>([&] { other->head(torch::randn({2, 12})); }, {"serves an embedding only"});
    expect_error<ValueError>(
        [&] {
          other->table(torch::tensor({3, 10}));
        },
        {"'table.weight'", "not in the whole table"});
    SplitModel wrapped;
    replicate(wrapped, ReplicateOptions().mesh(mesh));
    expect_error<ValueError>([&] { parallelize(wrapped, mesh, "tp", split_plan()); }, {"before fully_shard()"});
  });
}

} // namespace shardwise::test
