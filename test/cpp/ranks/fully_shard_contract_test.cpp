// fully_shard(): what it promises besides the numbers: names, memory, hooks, errors.
#include "ranks/fully_shard_models.h"

#include "group/leaf_storage.h"

#include <chrono>
#include <thread>

namespace shardwise::test {

TEST(FullyShardContract, FullCopiesComeAndGo) {
  run_ranks(2, [](Rank& rank) {
    Stack ours;
    auto root = shard_stack(ours, sharded_on(rank));
    const auto freed = [&] {
      std::string text;
      for (size_t i = 0; i < 3; ++i) text += group::is_freed(ours->block(i)->up->weight) ? "-" : "+";
      return text + (group::is_freed(ours->head->weight) ? "-" : "+");
    };
    ASSERT_EQ(freed(), "----");
    auto loss = stack_loss(ours, 0, rank.rank());
    ASSERT_EQ(freed(), "---+") << "the root keeps its own";
    loss.backward();
    ASSERT_EQ(freed(), "----");
    root.set_reshard_after_forward(false);
    loss = stack_loss(ours, 0, rank.rank());
    ASSERT_EQ(freed(), "++++");
    root.set_reshard_after_backward(false);
    loss.backward();
    ASSERT_EQ(freed(), "++++");
    root.reset();
    ASSERT_EQ(freed(), "----");
  });
}

TEST(FullyShardContract, AnOuterUnitStaysWhileAnInnerOneRuns) {
  run_ranks(2, [](Rank& rank) {
    Stack ours;
    auto inner = fully_shard(ours->block(0)->up, sharded_on(rank));
    auto outer = fully_shard(ours->block(0), sharded_on(rank));
    fully_shard(ours, sharded_on(rank));
    const auto outer_alone = [&] { return outer.counters().unshards - inner.counters().unshards; };
    auto loss = stack_loss(ours, 0, rank.rank());
    ASSERT_EQ(outer_alone(), 1) << "its norm runs before the inner unit, its second layer after it";
    loss.backward();
    ASSERT_EQ(outer_alone(), 2);
  });
}

TEST(FullyShardContract, AWriteWhileAGatherIsUnderWay) {
  // T06: what is gathered is out of date when it comes.
  for (const auto layout : {ShardLayout::rows, ShardLayout::flat}) {
    run_ranks(2, [&](Rank& rank) {
      auto both = stacks(rank, sharded_on(rank).layout(layout));
      const torch::NoGradGuard guard;
      for (int step = 0; step < 3; ++step) {
        // Its first operation touches one parameter, and so once.
        unit(*both.ours).unshard(/*async=*/true);
        // Until the old values are there.
        std::this_thread::sleep_for(std::chrono::milliseconds(50));
        both.each([](Stack& model) {
          for (auto& parameter : model->parameters()) parameter.mul_(0.7);
        });
        assert_close(both.ours->forward(tokens(step, 0)), both.reference->forward(tokens(step, 0)), "a step");
      }
    });
  }
}

TEST(FullyShardContract, LibraryModules) {
  run_ranks(2, [](Rank& rank) {
    using namespace torch::nn;
    struct MixImpl : Module {
      MixImpl() {
        fill(*this);
        layer->eval(); // no dropout
      }
      torch::Tensor forward(const torch::Tensor& x) {
        auto y = std::get<0>(lstm->forward(x));
        y = layer->forward(y);
        y = std::get<0>(attention->forward(y, y, y));
        return norm->forward(conv->forward(y.permute({1, 2, 0})));
      }
      LSTM lstm = register_module("lstm", LSTM(LSTMOptions(4, 8).num_layers(2)));
      TransformerEncoderLayer layer =
          register_module("layer", TransformerEncoderLayer(TransformerEncoderLayerOptions(8, 2).dim_feedforward(12)));
      MultiheadAttention attention = register_module("attention", MultiheadAttention(8, 2));
      Conv1d conv = register_module("conv", Conv1d(Conv1dOptions(8, 6, 3)));
      BatchNorm1d norm = register_module("norm", BatchNorm1d(BatchNormOptions(6).track_running_stats(false)));
    };
    using Mix = ModuleHolder<MixImpl>;
    Mix ours(std::make_shared<MixImpl>());
    for (const auto& child : ours->children()) fully_shard(*child, sharded_on(rank));
    fully_shard(ours, sharded_on(rank));
    Pair<Mix> both{rank, ours, Mix(std::make_shared<MixImpl>())};
    both.train([](Mix& model, int step, int r) {
      return model->forward(torch::randn({5, 3, 4}, generator(100 * step + r))).pow(3).mean();
    });
  });
}

TEST(FullyShardContract, ErrorsNameTheParameterAndTheRemedy) {
  run_ranks(2, [](Rank& rank) {
    const auto options = sharded_on(rank);
    const auto dim_of = [&](int64_t dim) {
      return sharded_on(rank).shard_placement([dim](const std::string&, const torch::Tensor&) { return dim; });
    };
    Stack done;
    shard_stack(done, options);
    Stack replicated;
    replicate(replicated, on(rank));
    struct OneImpl : torch::nn::Module {
      explicit OneImpl(const torch::Tensor& tensor) : p(register_parameter("p", tensor)) {}
      torch::Tensor p;
    };
    const auto module_of = [](const torch::Tensor& tensor) { return std::make_shared<OneImpl>(tensor); };
    const auto scalar = module_of(torch::ones({}));
    const auto strided = module_of(torch::ones({3, 4}).t());
    const auto channels_last = module_of(torch::ones({2, 3, 4, 4}).contiguous(torch::MemoryFormat::ChannelsLast));
    torch::nn::Embedding limited(torch::nn::EmbeddingOptions(4, 3).max_norm(0.1));
    fully_shard(limited, options);
    torch::nn::Linear gone(3, 4);
    auto unit_of_gone = fully_shard(gone, options);
    gone = nullptr;
    const torch::nn::Linear shared(3, 3);
    torch::nn::Sequential first(torch::nn::Linear(4, 3), shared), second(shared, torch::nn::Linear(3, 2));
    fully_shard(first, options);
    torch::nn::Sequential normed(torch::nn::Linear(3, 4), torch::nn::BatchNorm1d(4));
    fully_shard(normed, sharded_on(rank).mixed_precision(MixedPrecision().param_dtype(torch::kBFloat16)));
    struct Case {
      std::string what;
      std::function<void()> call;
      std::vector<std::string> parts;
    };
    const std::vector<Case> cases{
        {"twice", [&] { fully_shard(done, options); }, {"only be applied to a module once", "fully_shard"}},
        {"replicate after fully_shard", [&] { replicate(done, on(rank)); }, {"already managed by `fully_shard`"}},
        {"fully_shard after replicate", [&] { fully_shard(replicated, options); }, {"already managed by `replicate`"}},
        {"nothing", [&] { fully_shard(std::vector<std::shared_ptr<torch::nn::Module>>{}, options); }, {"no modules"}},
        {"a scalar",
         [&] { fully_shard(*scalar, options); },
         {"scalar parameters. Change p to a 1D tensor", "or name it in whole_parameters()"}},
        {"not contiguous", [&] { fully_shard(*strided, options); }, {"'p'", "non-contiguous", "contiguous()"}},
        {"channels_last",
         [&] { fully_shard(*channels_last, options); },
         {"'p'", "non-contiguous", "channels_last even if only its input is"}},
        {"max_norm",
         [&] {
           limited->forward(torch::tensor({1, 2}));
         },
         {"'weight'", "embedding_renorm_", "would be lost"}},
        {"a replicated scalar that is cast",
         [&] { replicate(*scalar, on(rank).mixed_precision(MixedPrecision().param_dtype(torch::kBFloat16))); },
         {"replicate doesn't support scalar parameters. Change p to a 1D tensor"}},
        {"what is replicated and cast, and not contiguous",
         [&] { replicate(*strided, on(rank).mixed_precision(MixedPrecision().param_dtype(torch::kBFloat16))); },
         {"replicate does not support non-contiguous", "'p'", "before replicate()"}},
        {"no such dimension", [&] { fully_shard(Stack(), dim_of(5)); }, {"along dimension 5", "embedding.weight"}},
        {"a mesh of three axes",
         [&] {
           fully_shard(Stack(), FullyShardOptions().mesh(rank.mesh({{"a", 1}, {"b", 2}, {"c", 1}})));
         },
         {"fully_shard expects a 1D or 2D", "a=1, b=2"}},
        {"a write to a full copy",
         [&] {
           const torch::NoGradGuard guard;
           done->block(1)->down->weight.zero_();
         },
         {"blocks.1.down.weight", "zero_", "would be lost", "parameters()"}},
        {"no unit", [&] { unit(*Stack()); }, {"has no unit"}},
        {"a unit without its module",
         [&] { unit_of_gone.unshard(); },
         {"the wrapped parameter 'weight' is gone: its module was destroyed"}},
        {"a layer of two models",
         [&] { fully_shard(second, options); },
         {"'0.weight' of this module is in the unit, and '0.weight' of the unit is not", "together, in one call"}},
        {"buffers of another dtype",
         [&] { normed->forward(batch(0, rank.rank(), 3)); },
         {"a batch norm of unit '' has its parameters in bfloat16", "param_dtype_override()", "torch says: "}},
    };
    for (const auto& [what, call, parts] : cases) {
      SCOPED_TRACE(what);
      rank.step(what);
      expect_error<Error>(call, parts);
    }
    // None of them left anything behind.
    Pair<Stack>{rank, done, Stack()}.train(stack_loss, 3);
  });
}

TEST(FullyShardContract, RanksThatWrapDifferently) {
  run_ranks(2, [](Rank& rank) {
    Stack same;
    const auto wrap = [&] { rank.rank() == 0 ? fully_shard(same, sharded_on(rank)) : replicate(same, on(rank)); };
    expect_error<Error>(wrap, {"the ranks wrap different modules", "cut along 0"});
  });
}

} // namespace shardwise::test
