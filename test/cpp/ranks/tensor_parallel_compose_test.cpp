// parallelize() along one axis of a mesh, and fully_shard() or replicate() along the others.
#include "ranks/saved_models.h"
#include "ranks/split_models.h"
#include "support/folder.h"

#include <ATen/autocast_mode.h>

#include <limits>

namespace shardwise::test {
namespace {

/// How a model comes onto a mesh whose last axis is "tp".
struct SplitLayout {
  std::string name;
  std::vector<Axis> axes;
  std::function<void(SplitModel&, const Mesh&)> wrap;

  int world() const {
    int64_t product = 1;
    for (const auto& axis : axes) product *= axis.size;
    return static_cast<int>(product);
  }
};

void shard(SplitModel& model, const FullyShardOptions& options) {
  for (const auto& block : *model->layers) fully_shard(block.ptr(), options);
  fully_shard(model, options);
}

std::vector<SplitLayout> layouts() {
  const std::vector<Axis> two{{"dp", 2}, {"tp", 2}};
  const std::vector<Axis> three{{"replicate", 2}, {"shard", 2}, {"tp", 2}};
  const auto sharded = [](ShardLayout layout) {
    return [layout](SplitModel& model, const Mesh& mesh) {
      shard(model, FullyShardOptions().mesh(mesh.along({"dp"})).layout(layout));
    };
  };
  return {
      {"plain", {{"tp", 3}}, [](SplitModel&, const Mesh&) {}},
      {"rows", two, sharded(ShardLayout::rows)},
      {"flat", two, sharded(ShardLayout::flat)},
      {"replicate", two,
       [](SplitModel& model, const Mesh& mesh) { replicate(model, ReplicateOptions().mesh(mesh.along({"dp"}))); }},
      {"hybrid", three, [](SplitModel& model, const Mesh& mesh) {
         shard(model, FullyShardOptions().mesh(mesh.along({"replicate", "shard"})));
       }}};
}

/// The number of replicas, and which one a rank is of.
int64_t replicas(const Mesh& mesh) {
  return mesh.size() / mesh.size("tp");
}
int64_t replica(const Mesh& mesh) {
  return mesh.rank() / mesh.size("tp");
}

SplitModel model_on(const SplitLayout& layout, const Mesh& mesh, uint64_t seed = 7) {
  SplitModel model;
  fill(*model, seed);
  model->to(torch::kDouble);
  parallelize(model, mesh, "tp", split_plan());
  layout.wrap(model, mesh);
  return model;
}

std::shared_ptr<AdamW> optimizer_for(SplitModel& model) {
  return std::make_shared<AdamW>(each_once(*model), torch::optim::AdamWOptions(0.05).eps(0.1));
}

void train(SplitModel& model, AdamW& optimizer, const Mesh& mesh, int first, int last) {
  for (int step = first; step < last; ++step) {
    optimizer.zero_grad();
    loss_of(model, step, replica(mesh)).backward();
    optimizer.step();
  }
}

/// What one process computes with the data of all replicas.
struct OneProcess {
  explicit OneProcess(int64_t number) : count(number) {
    model->to(torch::kDouble);
    optimizer = optimizer_for(model);
  }
  void train(int first, int last) {
    for (int step = first; step < last; ++step) {
      optimizer->zero_grad();
      for (int64_t i = 0; i < count; ++i) (loss_of(model, step, i) / count).backward();
      optimizer->step();
    }
  }
  int64_t count;
  SplitModel model;
  std::shared_ptr<AdamW> optimizer;
};

/// Runs each layout on ranks of its own.
void on_all_layouts(const std::function<void(Rank& rank, const SplitLayout& layout, const Mesh& mesh)>& run) {
  for (const auto& layout : layouts()) {
    SCOPED_TRACE(layout.name);
    run_ranks(layout.world(), [&](Rank& rank) { run(rank, layout, rank.mesh(layout.axes)); });
  }
}

} // namespace

TEST(TensorParallelCompose, ClipsByTheNormOfTheWhole) {
  on_all_layouts([&](Rank& /*rank*/, const SplitLayout& layout, const Mesh& mesh) {
    auto model = model_on(layout, mesh);
    OneProcess reference(replicas(mesh));
    loss_of(model, 0, replica(mesh)).backward();
    for (int64_t i = 0; i < reference.count; ++i) (loss_of(reference.model, 0, i) / reference.count).backward();
    for (const double order : {2.0, std::numeric_limits<double>::infinity()}) {
      const auto norm = clip_grad_norm_(model->parameters(), 0.1, order).item<double>();
      const double expected = torch::nn::utils::clip_grad_norm_(each_once(*reference.model), 0.1, order);
      EXPECT_NEAR(norm, expected, 1e-9);
    }
    optimizer_for(model)->step();
    optimizer_for(reference.model)->step();
    expect_near(full_state_dict(*model), full_state_dict(*reference.model), "after a clipped step");
  });
}

// Onto a model that was made on the meta device.
TEST(TensorParallelCompose, LoadsWhatOneProcessHas) {
  on_all_layouts([&](Rank& rank, const SplitLayout& layout, const Mesh& mesh) {
    OneProcess reference(replicas(mesh));
    reference.train(0, 2);
    auto model = on_meta([] { return SplitModel(); });
    for (auto& parameter : model->parameters()) parameter.set_data(parameter.to(torch::kDouble));
    parallelize(model, mesh, "tp", split_plan());
    layout.wrap(model, mesh);
    to_empty(model, mesh.device());
    auto optimizer = optimizer_for(model);
    StateDict values, state;
    if (rank.rank() == 0) {
      values = full_state_dict(*reference.model);
      state = full_optimizer_state_dict(*reference.model, *reference.optimizer);
    }
    load_full_state_dict(*model, values);
    load_full_optimizer_state_dict(*model, *optimizer, state);
    expect_same(full_state_dict(*model), full_state_dict(*reference.model));
    train(model, *optimizer, mesh, 2, 4);
    reference.train(2, 4);
    expect_near(full_state_dict(*model), full_state_dict(*reference.model), "trained on");
    const auto only_first = full_state_dict(*model, FullStateDictOptions().rank0_only(true));
    EXPECT_EQ(only_first.is_empty(), rank.rank() != 0);
  });
}

TEST(TensorParallelCompose, AnyLayoutLoadsWhatAnyOtherSaved) {
  const TemporaryFolder folder;
  // What one rank has on its device is not for others to wait for.
  const auto on_host = FullStateDictOptions().cpu_offload(true);
  const auto all = layouts();
  for (size_t position = 0; position < all.size(); ++position) {
    const auto& from = all[position];
    const auto path = folder / from.name;
    StateDict values, state;
    run_ranks(from.world(), [&](Rank& rank) {
      const auto mesh = rank.mesh(from.axes);
      auto model = model_on(from, mesh);
      auto optimizer = optimizer_for(model);
      train(model, *optimizer, mesh, 0, 2);
      save(path, model, *optimizer);
      const auto whole = full_state_dict(*model, on_host);
      const auto of_optimizer = full_optimizer_state_dict(*model, *optimizer, on_host);
      if (rank.rank() > 0) return;
      values = whole;
      state = of_optimizer;
    });
    // A process that knows nothing of parallelize().
    SplitModel alone;
    alone->to(torch::kDouble);
    auto optimizer_alone = optimizer_for(alone);
    load(path, alone, *optimizer_alone);
    expect_same(full_state_dict(*alone, on_host), values);
    // Not to all in the short form: each to another one, and to itself.
    for (size_t i = 0; i < by_form<size_t>(2, all.size()); ++i) {
      const auto& to = all[(position + i) % all.size()];
      SCOPED_TRACE(from.name + " to " + to.name);
      run_ranks(to.world(), [&](Rank& rank) {
        const auto mesh = rank.mesh(to.axes);
        auto model = model_on(to, mesh, 5);
        auto optimizer = optimizer_for(model);
        load(path, model, *optimizer);
        expect_same(full_state_dict(*model, on_host), values);
        expect_same(full_optimizer_state_dict(*model, *optimizer, on_host), state);
        train(model, *optimizer, mesh, 2, 3);
      });
    }
  }
}

TEST(TensorParallelCompose, OneRanksInfiniteGradientSkipsTheStepOnAll) {
  on_all_layouts([&](Rank& rank, const SplitLayout& layout, const Mesh& mesh) {
    auto model = model_on(layout, mesh);
    auto optimizer = optimizer_for(model);
    GradScaler scaler;
    for (const bool is_infinite : {false, true, false}) {
      optimizer->zero_grad();
      scaler.scale(loss_of(model, 0, replica(mesh))).backward();
      // Of a piece that only this rank has.
      if (is_infinite && mesh.coordinate("tp") == 1) {
        for (const auto& entry : model->named_parameters()) {
          if (entry.key().ends_with("raw.gate") && entry.value().numel() > 0) {
            entry.value().mutable_grad().fill_(std::numeric_limits<double>::infinity());
          }
        }
      }
      const auto before = full_state_dict(*model);
      scaler.step(*optimizer);
      scaler.update();
      const auto after = full_state_dict(*model);
      for (const auto& item : before) {
        EXPECT_EQ(torch::equal(item.value(), after[item.key()]), is_infinite) << item.key() << " on " << rank.name();
      }
    }
  });
}

TEST(TensorParallelCompose, MixedPrecision) {
  for (const auto reduce : {torch::kFloat, torch::kBFloat16}) {
    run_ranks(4, [&](Rank& rank) {
      const auto mesh = rank.mesh({{"dp", 2}, {"tp", 2}});
      const auto half = MixedPrecision().param_dtype(torch::kBFloat16).reduce_dtype(reduce);
      SplitModel ours, reference;
      parallelize(ours, mesh, "tp", split_plan());
      shard(ours, FullyShardOptions().mesh(mesh.along({"dp"})).mixed_precision(half));
      torch::optim::SGD mine(each_once(*ours), 0.02), theirs(each_once(*reference), 0.02);
      for (int step = 0; step < 4; ++step) {
        mine.zero_grad();
        theirs.zero_grad();
        const auto loss = loss_of(ours, step, replica(mesh));
        EXPECT_EQ(loss.scalar_type(), torch::kBFloat16);
        loss.backward();
        for (int64_t i = 0; i < 2; ++i) (loss_of(reference, step, i) / 2).backward();
        mine.step();
        theirs.step();
      }
      const auto whole = full_state_dict(*ours);
      for (const auto& entry : reference->named_parameters()) {
        const auto moved = (entry.value() - SplitModel()->named_parameters()[entry.key()]).abs().max().item<double>();
        const auto error = (whole[entry.key()] - entry.value()).abs().max().item<double>();
        EXPECT_EQ(whole[entry.key()].scalar_type(), torch::kFloat);
        EXPECT_LT(error, 0.15 * moved + 2e-3) << entry.key();
      }
    });
  }
}

TEST(TensorParallelCompose, Autocast) {
  run_ranks(2, [](Rank& rank) {
    SplitModel ours, reference;
    parallelize(ours, rank.mesh({{"tp", 2}}), "tp", split_plan());
    const auto run = [](SplitModel& model) {
      at::autocast::set_autocast_enabled(at::kCPU, true);
      auto logits = model->forward(tokens_of(0, 0));
      at::autocast::clear_cache();
      at::autocast::set_autocast_enabled(at::kCPU, false);
      logits.to(torch::kFloat).pow(2).mean().backward();
      return logits;
    };
    const auto mine = run(ours);
    const auto expected = run(reference);
    EXPECT_EQ(mine.scalar_type(), expected.scalar_type());
    EXPECT_TRUE(torch::allclose(mine.to(torch::kFloat), expected.to(torch::kFloat), 0.05, 0.05));
    for (const auto& entry : ours->named_parameters()) {
      const auto piece = split_piece(entry.key(), reference->named_parameters()[entry.key()].grad(), 2, rank.rank());
      const auto scale = piece.abs().max().item<double>();
      EXPECT_LT((entry.value().grad() - piece).abs().max().item<double>(), 0.1 * scale + 1e-3) << entry.key();
    }
  });
}

// Sums up gradients, and computes its activations again. The first rank's values count.
TEST(TensorParallelCompose, TrainsAsOneProcess) {
  on_all_layouts([&](Rank& rank, const SplitLayout& layout, const Mesh& mesh) {
    auto model = model_on(layout, mesh, rank.rank() == 0 ? 7 : 9);
    auto optimizer = optimizer_for(model);
    OneProcess reference(replicas(mesh));
    const auto loss = [&](SplitModel& of, int step, int64_t data, bool with_checkpoint) {
      const auto tokens = tokens_of(step, data);
      auto hidden = of->table(tokens);
      for (const auto& block : *of->layers) {
        const auto run = [&](const torch::Tensor& x) { return block.ptr()->as<SplitBlockImpl>()->forward(x); };
        hidden = with_checkpoint ? activation_checkpoint(run, hidden) : run(hidden);
      }
      return of->head(hidden).pow(2).mean();
    };
    for (int step = 0; step < 3; ++step) {
      optimizer->zero_grad();
      reference.optimizer->zero_grad();
      for (int part = 0; part < 2; ++part) {
        if (layout.name != "plain") unit(*model).set_requires_gradient_sync(part == 1);
        loss(model, 2 * step + part, replica(mesh), true).backward();
        for (int64_t i = 0; i < reference.count; ++i) {
          (loss(reference.model, 2 * step + part, i, false) / reference.count).backward();
        }
      }
      optimizer->step();
      reference.optimizer->step();
      expect_near(full_state_dict(*model), full_state_dict(*reference.model), "step " + std::to_string(step));
    }
    expect_near(
        full_optimizer_state_dict(*model, *optimizer),
        full_optimizer_state_dict(*reference.model, *reference.optimizer), "the optimizer");
  });
}

} // namespace shardwise::test
