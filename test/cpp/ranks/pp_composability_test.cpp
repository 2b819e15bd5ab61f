// The rows of pipelines beside data and tensor parallelism.
#include "ranks/pipeline_models.h"
#include "ranks/saved_models.h"
#include "support/folder.h"

namespace shardwise::test {
namespace {

const int64_t kMicrobatchesOfAStep = by_form<int64_t>(4, 8);
const int64_t kRows = 2 * kMicrobatchesOfAStep;
const int64_t kReplicas = by_form<int64_t>(2, 4);

/// The first five: those of the rows.
std::vector<ScheduleCase> row_schedules() {
  return {kSchedules.begin(), kSchedules.begin() + 5};
}

/// The stages of a rank, and how the rank's replica is called.
struct StagesOnMesh {
  using Wrap = std::function<void(Mlp&)>;

  StagesOnMesh(const Mesh& mesh, const ScheduleCase& each, int64_t which, torch::ScalarType dtype, const Wrap& wrap)
      : replica(which),
        pipeline(
            mesh, "pp",
            [&](int64_t stage) {
              auto model = stage_model(stage, dtype);
              wrap(model);
              own.emplace(stage, model);
              return PipelineStage(model);
            },
            options_of(each, kMicrobatchesOfAStep)) {
    optimizer = optimizer_of(parameters_of(own));
  }
  bool has(int64_t stage) const {
    return own.contains(stage);
  }
  /// The losses of the microbatches.
  std::vector<torch::Tensor> step(int number, torch::ScalarType dtype) {
    optimizer->zero_grad();
    const auto x = rows_of(number, replica, kRows, dtype);
    const auto y = rows_of(number, replica + 50, kRows, dtype);
    return pipeline.step({x}, {y}).losses;
  }

  int64_t replica;
  Stages own;
  Pipeline pipeline;
  std::shared_ptr<AdamW> optimizer;
};

/// One process that sees the data of all replicas.
struct AllReplicas {
  AllReplicas(int64_t stages, int64_t number)
      : whole(stages),
        replicas(number),
        optimizer(optimizer_of(parameters_of(whole.models))) {}
  /// The losses of the microbatches of one replica.
  std::vector<torch::Tensor> step(int number, int64_t which) {
    optimizer->zero_grad();
    std::vector<torch::Tensor> losses;
    for (int64_t replica = 0; replica < replicas; ++replica) {
      const auto xs = rows_of(number, replica, kRows).tensor_split(kMicrobatchesOfAStep);
      const auto ys = rows_of(number, replica + 50, kRows).tensor_split(kMicrobatchesOfAStep);
      for (int64_t i = 0; i < kMicrobatchesOfAStep; ++i) {
        const auto loss = mean_loss({whole.forward(xs[i])}, {ys[i]});
        if (replica == which) losses.push_back(loss.detach());
        (loss / (kMicrobatchesOfAStep * replicas)).backward();
      }
    }
    return losses;
  }
  WholePipeline whole;
  int64_t replicas;
  std::shared_ptr<AdamW> optimizer;
};

void expect_losses(
    const std::vector<torch::Tensor>& got, const std::vector<torch::Tensor>& wanted, double tolerance,
    const std::string& what) {
  ASSERT_EQ(got.size(), wanted.size()) << what;
  for (size_t i = 0; i < got.size(); ++i) {
    ASSERT_TRUE(torch::allclose(got[i].to(torch::kDouble), wanted[i], tolerance, tolerance))
        << what << ", microbatch " << i << got[i] << wanted[i];
  }
}

/// Trains both, and compares the losses of each step. In double precision also the gradients.
void train_beside(Rank& rank, StagesOnMesh& ours, AllReplicas& reference, torch::ScalarType dtype, double tolerance) {
  for (int step = 0; step < by_form(3, 5); ++step) {
    const auto what = "step " + std::to_string(step);
    rank.step(what);
    const auto losses = ours.step(step, dtype);
    const auto expected = reference.step(step, ours.replica);
    if (ours.has(ours.pipeline.stages() - 1)) expect_losses(losses, expected, tolerance, what);
    if (dtype == torch::kDouble) assert_stages(ours.own, reference.whole, what);
    ours.optimizer->step();
    reference.optimizer->step();
  }
}

/// The values of all that ranks have of these stages.
void assert_values(const Stages& own, const WholePipeline& reference, double relative = 1e-9, double absolute = 1e-11) {
  for (const auto& [number, model] : own) {
    const auto whole = full_state_dict(model);
    for (const auto& entry : reference.models.at(number)->named_parameters()) {
      const auto& mine = whole[entry.key()];
      ASSERT_EQ(mine.scalar_type(), model->parameters()[0].scalar_type());
      ASSERT_TRUE(torch::allclose(mine.cpu().to(torch::kDouble), entry.value().cpu(), relative, absolute))
          << entry.key() << " of stage " << number;
    }
  }
}

double tolerance_of(torch::ScalarType computed) {
  return computed == torch::kBFloat16 ? 0.05 : 1e-5;
}

/// In what a schedule computes: both, but in the short form bf16 for some schedules only.
std::vector<torch::ScalarType> computed_with(const ScheduleCase& each) {
  const bool both = is_long_form() || each.schedule == PipelineSchedule::one_forward_one_backward ||
                    each.schedule == PipelineSchedule::interleaved_zero_bubble;
  return both ? std::vector{torch::kFloat, torch::kBFloat16} : std::vector{torch::kFloat};
}

} // namespace

// Its parameters are in single precision, what is computed in bf16 or that too.
TEST(Composability, 3dWithTpDpPp) {
  // All in one run of the ranks: making their process groups takes longer than training.
  run_ranks(8, [&](Rank& rank) {
    for (const auto& each : row_schedules()) {
      for (const auto computed : computed_with(each)) {
        const auto mesh = rank.mesh({{"dp", 2}, {"pp", 2}, {"tp", 2}});
        const auto wrap = [&](Mlp& model) {
          parallelize(model, mesh, "tp", {{"in_proj", colwise()}, {"out_proj", rowwise()}});
          const auto options = FullyShardOptions()
                                   .mesh(mesh.along({"dp"}))
                                   .reshard_after_forward(false)
                                   .mixed_precision(MixedPrecision().param_dtype(computed).reduce_dtype(torch::kFloat));
          fully_shard(model->in_proj, options);
          fully_shard(model, options);
        };
        const auto replica = mesh.coordinate("dp");
        StagesOnMesh ours(mesh, each, replica, torch::kFloat, wrap);
        AllReplicas reference(ours.pipeline.stages(), 2);
        const auto tolerance = tolerance_of(computed);
        train_beside(rank, ours, reference, torch::kFloat, tolerance);
        assert_values(ours.own, reference.whole, tolerance, tolerance);
      }
    }
  });
}

TEST(Composability, ReplicatePp) {
  // All in one run of the ranks: making their process groups takes longer than training.
  run_ranks(static_cast<int>(2 * kReplicas), [&](Rank& rank) {
    for (const auto& each : row_schedules()) {
      for (const auto computed : computed_with(each)) {
        const auto mesh = rank.mesh({{"replicate", kReplicas}, {"pp", 2}});
        const auto wrap = [&](Mlp& model) {
          const auto options = ReplicateOptions()
                                   .mesh(mesh.along({"replicate"}))
                                   .mixed_precision(MixedPrecision().param_dtype(computed).reduce_dtype(torch::kFloat));
          replicate(model->in_proj, options);
          replicate(model, options);
        };
        const auto replica = mesh.coordinate("replicate");
        StagesOnMesh ours(mesh, each, replica, torch::kFloat, wrap);
        AllReplicas reference(ours.pipeline.stages(), kReplicas);
        train_beside(rank, ours, reference, torch::kFloat, tolerance_of(computed));
      }
    }
  });
}

TEST(Composability, ReplicatePpGrads) {
  run_ranks(static_cast<int>(2 * kReplicas), [&](Rank& rank) {
    for (const auto& each : row_schedules()) {
      const auto mesh = rank.mesh({{"replicate", kReplicas}, {"pp", 2}});
      const auto replica = mesh.coordinate("replicate");
      StagesOnMesh ours(mesh, each, replica, torch::kDouble, [&](Mlp& model) {
        replicate(model, ReplicateOptions().mesh(mesh.along({"replicate"})));
      });
      AllReplicas reference(ours.pipeline.stages(), kReplicas);
      train_beside(rank, ours, reference, torch::kDouble, 1e-10);
    }
  });
}

namespace {

/// The stages of one rank, under the names that they have in the whole model.
struct ChunkImpl : torch::nn::Module {
  explicit ChunkImpl(const Stages& stages) {
    for (const auto& [number, model] : stages) register_module("layer" + std::to_string(number), model);
  }
};
TORCH_MODULE(Chunk);

} // namespace

// Each stage is sharded; one process loads what the pipeline saved, and another pipeline with other stages goes on.
TEST(Composability, PpAndDcp) {
  const TemporaryFolder folder;
  const auto path = folder / "step";
  const std::vector<Axis> axes{{"pp", 2}, {"dp", 2}};
  const auto sharded = [](const Mesh& mesh) {
    return [mesh](Mlp& model) { fully_shard(model, FullyShardOptions().mesh(mesh.along({"dp"}))); };
  };
  const auto& saves = kSchedules[2];
  const auto& loads = kSchedules[5];
  run_ranks(4, [&](Rank& rank) {
    const auto mesh = rank.mesh(axes);
    StagesOnMesh ours(mesh, saves, mesh.coordinate("dp"), torch::kDouble, sharded(mesh));
    for (int step = 0; step < 2; ++step) {
      ours.step(step, torch::kDouble);
      ours.optimizer->step();
    }
    Chunk chunk(ours.own);
    save(path, chunk, *ours.optimizer, SaveOptions().mesh(mesh));
  });
  AllReplicas reference(4, 2);
  for (int step = 0; step < 2; ++step) {
    reference.step(step, 0);
    reference.optimizer->step();
  }
  Stages all;
  for (int64_t i = 0; i < 4; ++i) all.emplace(i, stage_model(i));
  Chunk alone(all);
  auto optimizer = std::make_shared<AdamW>(alone->parameters(), torch::optim::AdamWOptions(0.05).eps(0.1));
  const auto loaded = load(path, alone, *optimizer);
  EXPECT_TRUE(loaded.missing.empty() && loaded.unexpected.empty());
  assert_values(all, reference.whole);
  reference.step(2, 0);
  reference.optimizer->step();
  run_ranks(4, [&](Rank& rank) {
    const auto mesh = rank.mesh(axes);
    StagesOnMesh ours(mesh, loads, mesh.coordinate("dp"), torch::kDouble, sharded(mesh));
    Chunk chunk(ours.own);
    // Of a checkpoint of all stages a rank takes its own.
    load(path, chunk, *ours.optimizer, LoadOptions().mesh(mesh).strict(false));
    ours.step(2, torch::kDouble);
    ours.optimizer->step();
    assert_values(ours.own, reference.whole);
  });
}

} // namespace shardwise::test
