// Training over a network whose results come late, in any order: shards and gradients are the same to the bit, and
// those of a single process.
#include "ranks/fully_shard_models.h"
#include "ranks/late_mesh.h"
#include "ranks/training_parity.h"

#include <array>

namespace shardwise::test {
namespace {

/// For each program and number of ranks, by groups. Where ranks compare what they do, that takes the most time.
const auto kSchedules = by_form<std::array<int, 3>>({4, 3, 4}, {12, 4, 20});
/// Then a new one is made: the first step of a model goes other ways than the later ones.
constexpr int kSchedulesOfAModel = 4;

/// A program, how its model is wrapped, and what is done with the handles.
template <typename Model>
struct LateProgram {
  Program<Model> program;
  std::function<void(Model&, const Mesh&)> wrap;
  /// Before each part of a step.
  std::function<void(Model&, int part)> before = [](Model&, int) {};
  std::function<void(Model&)> before_optimizer = [](Model&) {};
  std::function<void(Model&)> after_backwards = [](Model&) {};
};

/// A rank's model, trained from the same values each time.
template <typename Model>
class LateModel {
 public:
  LateModel(const LateProgram<Model>& late, const Mesh& mesh) : late_(late), model_(late.program.make()) {
    late.wrap(model_, mesh);
    for (const auto& parameter : model_->parameters()) first_values_.push_back(parameter.detach().clone());
  }

  /// Gives all gradients and values of every step.
  Trace train(int rank) {
    begin_again();
    const auto& program = late_.program;
    auto optimizer = optimizer_of(model_);
    Trace trace;
    Trace held;
    for (int step = 0; step < program.steps; ++step) {
      optimizer.zero_grad();
      for (int part = 0; part < program.parts; ++part) {
        late_.before(model_, part);
        program.loss(model_, step * program.parts + part, rank).backward();
      }
      late_.after_backwards(model_);
      for (const auto& parameter : model_->parameters()) {
        held.push_back(parameter.grad());
        trace.push_back(parameter.grad().clone());
      }
      late_.before_optimizer(model_);
      optimizer.step();
      for (const auto& parameter : model_->parameters()) {
        held.emplace_back();
        trace.push_back(parameter.detach().clone());
      }
    }
    // Gradients that the program keeps stay what they were.
    for (size_t i = 0; i < held.size(); ++i) {
      EXPECT_TRUE(!held[i].defined() || torch::equal(held[i], trace[i])) << "gradient " << i << " is not what it was";
    }
    return trace;
  }

 private:
  void begin_again() {
    const torch::NoGradGuard guard;
    const auto parameters = model_->parameters();
    for (size_t i = 0; i < parameters.size(); ++i) parameters[i].copy_(first_values_[i]);
  }

  const LateProgram<Model>& late_;
  Model model_;
  std::vector<torch::Tensor> first_values_;
};

/// The parts of all ranks make up a tensor, in the order of the ranks; or each is all of it.
void assert_makes_up(const Trace& parts, const torch::Tensor& single, const torch::Tensor& precise) {
  const auto same_size = [&](const torch::Tensor& part) { return part.sizes() == single.sizes(); };
  const bool whole = std::all_of(parts.begin(), parts.end(), same_size);
  for (const auto& ours : whole ? parts : Trace{torch::cat(parts).reshape(single.sizes())}) {
    ASSERT_TRUE(is_close(ours, single, 1e-5, 1e-6)) << ours << "\n" << single;
    ASSERT_TRUE(is_close(ours, precise, 1e-4, 1e-5)) << ours << "\n" << precise;
  }
}

template <typename Model>
void assert_expected(const std::vector<Trace>& traces, const Expected<Model>& expected) {
  const auto names = expected.program.make()->named_parameters().keys();
  size_t at = 0;
  for (int step = 0; step < expected.program.steps; ++step) {
    for (const auto which : {&ExpectedStep::gradients, &ExpectedStep::values}) {
      for (const auto& name : names) {
        Trace parts;
        for (const auto& trace : traces) parts.push_back(trace.at(at));
        ++at;
        SCOPED_TRACE(c10::str(name, " in step ", step));
        assert_makes_up(parts, (expected.single[step].*which).at(name), (expected.precise[step].*which).at(name));
      }
    }
  }
}

/// Trains once on time and then under every schedule; gives what the ranks computed.
template <typename Model>
std::vector<Trace> train_under_schedules(const LateProgram<Model>& late, int world, Groups groups) {
  std::vector<Trace> on_time(world);
  LateNetwork network(world);
  const auto run = [&](Rank& rank) {
    const auto mesh = late_mesh(network, rank, groups);
    auto& first = on_time[rank.rank()];
    first = LateModel<Model>(late, mesh).train(rank.rank());
    std::optional<LateModel<Model>> model;
    for (int schedule = 0; schedule < kSchedules.at(static_cast<size_t>(groups)); ++schedule) {
      rank.step("schedule " + std::to_string(schedule));
      SCOPED_TRACE("schedule " + std::to_string(schedule));
      network.be_late(rank.rank(), schedule);
      if (schedule % kSchedulesOfAModel == 0) model.emplace(late, mesh);
      const auto trace = model->train(rank.rank());
      EXPECT_EQ(network.complaints(), std::vector<std::string>());
      assert_same_bits({first}, {trace});
      if (testing::Test::HasFailure()) break;
    }
    if (testing::Test::HasFailure()) network.close();
  };
  run_ranks(world, [&](Rank& rank) {
    try {
      run(rank);
    } catch (...) {
      network.close();
      throw;
    }
  });
  EXPECT_GT(network.overtaken() + network.most_open(), 1) << "nothing was under way beside anything else";
  return on_time;
}

template <typename Model>
void train_late(const LateProgram<Model>& late) {
  for (const int world : {2, 3}) {
    const Expected<Model> expected(late.program, world);
    for (const auto groups : {Groups::two, Groups::one, Groups::one_unchecked}) {
      SCOPED_TRACE(c10::str(world, " ranks, groups ", static_cast<int>(groups)));
      assert_expected(train_under_schedules(late, world, groups), expected);
      if (testing::Test::HasFailure()) return;
    }
  }
}

Program<Stack> small_stack(int parts = 1) {
  return {.make = [] { return Stack(5, 2); }, .loss = stack_loss, .steps = 3, .parts = parts};
}

FullyShardOptions sharded(const Mesh& mesh) {
  return FullyShardOptions().mesh(mesh).broadcast(false);
}

/// Units in units in units.
void shard_deeply(Stack& model, const FullyShardOptions& options) {
  fully_shard(model->block(0)->up, options);
  shard_stack(model, options);
}

auto sharded_deeply(ShardLayout layout, std::optional<bool> reshard_after_forward = {}) {
  return [=](Stack& model, const Mesh& mesh) {
    shard_deeply(model, sharded(mesh).layout(layout).reshard_after_forward(reshard_after_forward));
  };
}

/// Two models that know nothing of each other, in one backward.
struct TwoStacksImpl : torch::nn::Module {
  Stack left = register_module("left", Stack(5, 1));
  Stack right = register_module("right", Stack(4, 1));
};
TORCH_MODULE(TwoStacks);

Program<TwoStacks> two_stacks() {
  const auto loss = [](TwoStacks& model, int number, int rank) {
    return stack_loss(model->left, number, rank) * stack_loss(model->right, number + 50, rank);
  };
  return {.make = [] { return TwoStacks(); }, .loss = loss, .steps = 3};
}

} // namespace

// R41: sums go on while backward does.
TEST(FullyShardLate, Rows) {
  train_late(LateProgram<Stack>{small_stack(), sharded_deeply(ShardLayout::rows)});
}

TEST(FullyShardLate, Flat) {
  train_late(LateProgram<Stack>{small_stack(), sharded_deeply(ShardLayout::flat)});
}

TEST(FullyShardLate, KeptCopies) {
  train_late(LateProgram<Stack>{small_stack(), sharded_deeply(ShardLayout::flat, false)});
}

TEST(FullyShardLate, GradientAccumulation) {
  const auto before = [](Stack& model, int part) {
    unit(*model).set_requires_gradient_sync(part == 1).set_reshard_after_backward(part == 1);
  };
  train_late(LateProgram<Stack>{small_stack(2), sharded_deeply(ShardLayout::rows), before});
}

/// The program ends its backwards itself, both of a step together.
template <typename Wrap>
LateProgram<Stack> ended_by_hand(const Wrap& wrap) {
  LateProgram<Stack> late{small_stack(2), wrap};
  late.before = [](Stack& model, int) { unit(*model).set_manual_backward_finalization(true); };
  late.after_backwards = [](Stack& model) { unit(*model).finalize_backward(); };
  return late;
}

// R37: sums of a backward that ended are under way while the next forward runs.
TEST(FullyShardLate, SumsGoOnAfterBackward) {
  for (const auto layout : {ShardLayout::rows, ShardLayout::flat}) train_late(ended_by_hand(sharded_deeply(layout)));
}

// R40: one module has several backwards of its own before those of the others.
TEST(FullyShardLate, ALossInChunks) {
  auto program = small_stack(2);
  program.loss = [](Stack& model, int number, int rank) {
    if (number % 2 == 1) return stack_loss(model, number, rank);
    torch::Tensor hidden;
    {
      const torch::NoGradGuard guard;
      hidden = model->block(1)->forward(model->embedding(tokens(number, rank)), 0.5);
    }
    return model->head(hidden).pow(2).mean() + model->head(hidden * 0.5).sum();
  };
  const auto wrap = [](Stack& model, const Mesh& mesh) {
    fully_shard(model->head, sharded(mesh));
    shard_stack(model, sharded(mesh));
  };
  train_late(LateProgram<Stack>{program, wrap});
}

TEST(FullyShardLate, PrefetchLists) {
  const auto wrap = [](Stack& model, const Mesh& mesh) {
    auto root = shard_stack(model, sharded(mesh).reshard_after_forward(true));
    auto first = unit(*model->block(0));
    auto last = unit(*model->block(1));
    root.set_forward_prefetch({first, last}).set_backward_prefetch({last, first});
    first.set_forward_prefetch({last});
    last.set_backward_prefetch({first});
  };
  train_late(LateProgram<Stack>{small_stack(), wrap});
}

TEST(FullyShardLate, TheOptimizerWritesWhatIsBeingGathered) {
  const auto gather = [](Stack& model) {
    for (size_t i = 0; i < 2; ++i) unit(*model->block(i)).unshard(/*async=*/true);
    unit(*model).unshard(/*async=*/true);
  };
  for (const auto layout : {ShardLayout::rows, ShardLayout::flat}) {
    train_late(LateProgram<Stack>{small_stack(), sharded_deeply(layout), [](Stack&, int) {}, gather});
  }
}

TEST(FullyShardLate, GathersThatAreGivenUp) {
  const auto gather = [](Stack& model, int) {
    for (size_t i = 0; i < 2; ++i) {
      auto block = unit(*model->block(i));
      block.unshard(/*async=*/true);
      block.reshard();
    }
  };
  for (const auto layout : {ShardLayout::rows, ShardLayout::flat}) {
    train_late(LateProgram<Stack>{small_stack(), sharded_deeply(layout), gather});
  }
}

TEST(FullyShardLate, Checkpoints) {
  auto program = small_stack();
  program.loss = [](Stack& model, int number, int rank) {
    auto x = model->embedding(tokens(number, rank));
    for (size_t i = 0; i < 2; ++i) {
      x = checkpoint([&model, i](const torch::Tensor& input) { return model->block(i)->forward(input, 0.5); }, x);
    }
    return model->head(x).pow(2).mean();
  };
  train_late(LateProgram<Stack>{program, sharded_deeply(ShardLayout::rows)});
}

TEST(FullyShardLate, Replicate) {
  const auto wrap = [](Stack& model, const Mesh& mesh) {
    const auto options = ReplicateOptions().mesh(mesh).broadcast(false);
    for (auto& block : *model->blocks) replicate(*block, options);
    replicate(model, options);
  };
  train_late(LateProgram<Stack>{small_stack(), wrap});
  train_late(ended_by_hand(wrap));
}

TEST(FullyShardLate, TwoTrees) {
  const auto wrap = [](TwoStacks& model, const Mesh& mesh) {
    shard_stack(model->left, sharded(mesh));
    shard_stack(model->right, sharded(mesh).layout(ShardLayout::flat));
  };
  train_late(LateProgram<TwoStacks>{two_stacks(), wrap});
}

TEST(FullyShardLate, ATreeOfShardsAndOneOfCopies) {
  const auto wrap = [](TwoStacks& model, const Mesh& mesh) {
    replicate(model->left, ReplicateOptions().mesh(mesh).broadcast(false));
    shard_stack(model->right, sharded(mesh));
  };
  train_late(LateProgram<TwoStacks>{two_stacks(), wrap});
}

} // namespace shardwise::test
