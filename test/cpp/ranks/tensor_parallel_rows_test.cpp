// The rows of data parallelism beside tensor parallelism: parallelize() along the last axis of a mesh.
#include "ranks/split_models.h"
#include "ranks/training_models.h"

namespace shardwise::test {
namespace {

const std::vector<int64_t> kRowWidths = by_form<std::vector<int64_t>>({3, 16}, {3, 5, 16, 17});

/// A stack of MLPs on a mesh, in double precision.
struct SplitRow {
  /// Wraps the model on what is left of the mesh.
  std::function<void(torch::nn::Sequential&, const Mesh&)> wrap;
  /// How many ranks along which a parameter's piece is cut once more, and which of them this is.
  std::string sharded_along;
  bool checkpointed = false;
};

torch::Tensor run_stack(torch::nn::Sequential& model, torch::Tensor x, bool checkpointed) {
  for (const auto& layer : *model) {
    const auto run = [&](const torch::Tensor& y) { return layer.ptr()->as<MlpImpl>()->forward(y); };
    x = checkpointed ? activation_checkpoint(run, x) : run(x);
  }
  return x;
}

torch::nn::Sequential precise_stack(int64_t width) {
  auto model = mlps(width, 3);
  model->to(torch::kDouble);
  return model;
}

/// What this rank has of a whole: the piece of its column or row of layers, and of that the shard.
torch::Tensor local_part(const std::string& name, const torch::Tensor& whole, const Mesh& mesh, const SplitRow& row) {
  const auto tensor_ranks = mesh.size("tp");
  const auto dim = name.ends_with("in_proj.weight") || name.ends_with("in_proj.bias") ? 0
                   : name.ends_with("out_proj.weight")                                ? 1
                                                                                      : -1;
  const auto piece = dim < 0 ? whole : chunk_of(whole, tensor_ranks, mesh.coordinate("tp"), dim);
  if (row.sharded_along.empty()) return piece;
  return chunk_of(piece, mesh.size(row.sharded_along), mesh.coordinate(row.sharded_along), 0);
}

void train_row(Rank& rank, const Mesh& mesh, int64_t width, int steps, const SplitRow& row) {
  auto ours = precise_stack(width);
  auto reference = precise_stack(width);
  parallelize(ours, mesh, "tp", {{"*.in_proj", colwise()}, {"*.out_proj", rowwise()}});
  row.wrap(ours, mesh);
  auto mine = optimizer_of(ours);
  auto theirs = optimizer_of(reference);
  const auto replicas = mesh.size() / mesh.size("tp");
  const auto replica = mesh.rank() / mesh.size("tp");
  const auto compare = [&](const std::string& what) {
    const auto expected = reference->named_parameters();
    for (const auto& entry : ours->named_parameters()) {
      const auto& whole = expected[entry.key()];
      const auto near = [&](const torch::Tensor& got, const torch::Tensor& all, const std::string& kind) {
        const auto part = local_part(entry.key(), all, mesh, row);
        ASSERT_EQ(got.sizes(), part.sizes()) << kind << entry.key();
        ASSERT_TRUE(torch::allclose(got, part, 1e-9, 1e-11)) << what << ": " << kind << entry.key() << got << part;
      };
      near(entry.value().detach(), whole.detach(), "");
      ASSERT_TRUE(entry.value().grad().defined()) << what << ": gradient of " << entry.key();
      near(entry.value().grad(), whole.grad(), "gradient of ");
    }
  };
  for (int step = 0; step < steps; ++step) {
    rank.step("width " + std::to_string(width) + ", step " + std::to_string(step));
    mine.zero_grad();
    theirs.zero_grad();
    const auto data = [&](int64_t which) { return batch(step, static_cast<int>(which), width).to(torch::kDouble); };
    const auto loss = run_stack(ours, data(replica), row.checkpointed).pow(2).sum();
    loss.backward();
    for (int64_t i = 0; i < replicas; ++i) {
      const auto expected = run_stack(reference, data(i), false).pow(2).sum();
      ASSERT_TRUE(i != replica || torch::allclose(loss, expected, 1e-10, 1e-12)) << loss << expected;
      (expected / replicas).backward();
    }
    compare("step " + std::to_string(step) + ", before the optimizer");
    mine.step();
    theirs.step();
    compare("step " + std::to_string(step));
  }
  const auto whole = full_state_dict(ours);
  for (const auto& entry : reference->named_parameters()) {
    ASSERT_TRUE(torch::allclose(whole[entry.key()], entry.value(), 1e-9, 1e-11)) << entry.key();
  }
}

SplitRow sharded_row(const std::vector<std::string>& axes, bool reshard, bool checkpointed) {
  return {
      [axes, reshard](torch::nn::Sequential& model, const Mesh& mesh) {
        const auto options = FullyShardOptions().mesh(mesh.along(axes)).reshard_after_forward(reshard);
        for (const auto& layer : *model) fully_shard(layer.ptr(), options);
        fully_shard(model, options);
      },
      axes.back(), checkpointed};
}

} // namespace

TEST(ReplicateTPTraining, ReplicateTp) {
  run_ranks(4, [](Rank& rank) {
    const auto mesh = rank.mesh({{"dp_replicate", 2}, {"tp", 2}});
    for (const auto width : kRowWidths) {
      for (const bool checkpointed : {false, true}) {
        const auto wrap = [](torch::nn::Sequential& model, const Mesh& on) {
          replicate(model, ReplicateOptions().mesh(on.along({"dp_replicate"})));
        };
        train_row(rank, mesh, width, by_form(3, 10), {wrap, "", checkpointed});
      }
    }
  });
}

// Inside of three, of which the first is a pipeline's of one stage.
TEST(FullyShardNDTraining, 2dMlpWithNdMesh) {
  run_ranks(4, [](Rank& rank) {
    const auto mesh = rank.mesh({{"pp", 1}, {"dp", 2}, {"tp", 2}});
    for (const auto width : kRowWidths) {
      for (const auto& [reshard, checkpointed] :
           {std::pair(true, false), std::pair(false, false), std::pair(true, true)}) {
        train_row(rank, mesh, width, by_form(3, 10), sharded_row({"dp"}, reshard, checkpointed));
      }
    }
  });
}

TEST(FullyShardHSDP3DTraining, 3dMlpWithNdMesh) {
  run_ranks(8, [](Rank& rank) {
    const auto mesh = rank.mesh({{"dp_replicate", 2}, {"dp_shard", 2}, {"tp", 2}});
    for (const auto width : kRowWidths) {
      for (const bool checkpointed : {false, true}) {
        train_row(
            rank, mesh, width, by_form(3, 10), sharded_row({"dp_replicate", "dp_shard"}, !checkpointed, checkpointed));
      }
    }
  });
}

} // namespace shardwise::test
