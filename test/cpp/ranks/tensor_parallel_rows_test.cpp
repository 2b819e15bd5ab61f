// The rows of data parallelism beside tensor parallelism: parallelize() along the last axis of a mesh.
#include "ranks/split_models.h"
#include "ranks/training_models.h"

namespace shardwise::test {
namespace {

const std::vector<int64_t> kRowWidths = by_form<std::vector<int64_t>>({3, 16}, {3, 5, 16, 17});

/// How a stack of MLPs that is divided among ranks comes onto the other axes of a mesh.
struct SplitRow {
  std::function<void(torch::nn::Sequential&, const Mesh&)> wrap;
  /// The axis along which a parameter's piece is cut once more; none if it is empty.
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

/// In double precision.
Program<torch::nn::Sequential> stack_program(int64_t width, bool checkpointed) {
  return {
      .make = [width] { return mlps(width, 3); },
      .loss =
          [=](torch::nn::Sequential& model, int number, int data) {
            return run_stack(model, batch_for(model, number, data, width), checkpointed).pow(2).sum();
          },
      .steps = by_form(3, 10),
      .dtype = torch::kDouble};
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

void train_row(Rank& rank, const Mesh& mesh, int64_t width, const SplitRow& row) {
  const auto tensor_ranks = mesh.size("tp");
  const Expected<torch::nn::Sequential> expected(
      stack_program(width, row.checkpointed), static_cast<int>(mesh.size() / tensor_ranks));
  torch::nn::Sequential ours(nullptr);
  const Wrapping<torch::nn::Sequential> wrapping{
      .wrap =
          [&](torch::nn::Sequential& model, Rank&) {
            model->to(torch::kDouble);
            parallelize(model, mesh, "tp", {{"*.in_proj", colwise()}, {"*.out_proj", rowwise()}});
            row.wrap(model, mesh);
            ours = model;
          },
      .piece = [&](const Rank&, const std::string& name,
                   const torch::Tensor& whole) { return local_part(name, whole, mesh, row); },
      .data = [&](const Rank&) { return static_cast<int>(mesh.rank() / tensor_ranks); }};
  Trace trace;
  train(rank, expected, wrapping, trace);
  const auto whole = full_state_dict(ours);
  for (const auto& [name, value] : expected.single.back().values) {
    ASSERT_TRUE(torch::allclose(whole[name], value, 1e-9, 1e-11)) << name;
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
        train_row(rank, mesh, width, {wrap, "", checkpointed});
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
        train_row(rank, mesh, width, sharded_row({"dp"}, reshard, checkpointed));
      }
    }
  });
}

TEST(FullyShardHSDP3DTraining, 3dMlpWithNdMesh) {
  run_ranks(8, [](Rank& rank) {
    const auto mesh = rank.mesh({{"dp_replicate", 2}, {"dp_shard", 2}, {"tp", 2}});
    for (const auto width : kRowWidths) {
      for (const bool checkpointed : {false, true}) {
        train_row(rank, mesh, width, sharded_row({"dp_replicate", "dp_shard"}, !checkpointed, checkpointed));
      }
    }
  });
}

} // namespace shardwise::test
