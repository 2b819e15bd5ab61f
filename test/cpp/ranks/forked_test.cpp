// A process that a rank forks, to save a snapshot or to load data, while the rank trains on (T44).
#include "ranks/fully_shard_models.h"
#include "ranks/pipeline_models.h"
#include "saves/background_save.h"
#include "saves/ranks.h"
#include "saves/save.h"
#include "support/expect.h"
#include "support/folder.h"
#include "unit/files/faulty_disk.h"

#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <future>
#include <iostream>

namespace shardwise::test {
namespace {

using Trained = Pair<torch::nn::Sequential>;

torch::Tensor forked_loss(torch::nn::Sequential& model, int step, int rank) {
  return model->forward(batch(step, rank, 6)).pow(2).mean();
}

/// What is wrong if `act` does not raise the error of a forked process.
std::string expect_refused(const std::function<void()>& act) {
  const auto text = text_of(act);
  return text.find("forked from a rank") == std::string::npos ? text : "";
}

/// What is wrong in the child: nothing where this is empty.
std::string look_as_child(Trained& both, const std::vector<torch::Tensor>& values, bool are_shared) {
  const auto parameters = both.ours->parameters();
  for (size_t i = 0; i < parameters.size(); ++i) {
    const auto use = text_of([&] {
      const torch::NoGradGuard guard;
      TORCH_CHECK(torch::equal(parameters[i], values[i]), "parameter ", i, " is not what it was at the fork");
      parameters[i].add_(1);
    });
    if (use.find(are_shared ? "forked from a rank" : "no error") == std::string::npos) return use;
  }
  const auto gradient = expect_refused([&] { parameters[0].grad().sum().item<float>(); });
  if (!gradient.empty()) return "a gradient: " + gradient;
  // A replicated unit has nothing to gather; torch itself runs no backward in a child.
  const auto step = text_of([&] {
    unit(*both.ours).reshard();
    both.backward(forked_loss, 7);
  });
  if (step.find("forked from a rank") == std::string::npos && step.find("Autograd-and-Fork") == std::string::npos) {
    return "a step: " + step;
  }
  const auto group = both.rank.mesh().group("world");
  std::vector<torch::Tensor> one{torch::ones({1})};
  const auto sum = expect_refused([&] { group->allreduce(one)->wait(); });
  return sum.empty() ? "" : "an all-reduce: " + sum;
}

/// Forks, and expects the child to find nothing wrong.
void in_child(
    Rank& rank, const std::function<std::string()>& look, const std::function<void()>& meanwhile = [] {}) {
  const auto child = fork();
  if (child == 0) {
    const auto problem = look();
    if (!problem.empty()) std::cerr << rank.name() << ", in the child: " << problem << std::endl;
    _exit(problem.empty() ? 0 : 1);
  }
  meanwhile();
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
}

void fork_while_training(
    Rank& rank, const std::function<void(torch::nn::Sequential&)>& wrap, const std::string& name, bool are_shared) {
  SCOPED_TRACE(name);
  auto ours = mlp({6, 8, 4});
  wrap(ours);
  Trained both{rank, ours, mlp({6, 8, 4})};
  both.backward(forked_loss, 0);
  both.optimize();
  both.backward(forked_loss, 1);
  std::vector<torch::Tensor> values;
  for (const auto& parameter : ours->parameters()) values.push_back(parameter.detach().clone());
  std::array<int, 2> trained{};
  ASSERT_EQ(pipe(trained.data()), 0);
  const auto look = [&]() -> std::string {
    char byte = 0;
    return read(trained[0], &byte, 1) == 1 ? look_as_child(both, values, are_shared) : "the parent is gone";
  };
  in_child(rank, look, [&] {
    both.optimize();
    both.backward(forked_loss, 2);
    ASSERT_EQ(write(trained[1], "x", 1), 1);
  });
  both.optimize();
  for (const int end : trained) close(end);
  assert_state(full_state_dict(ours), plain_state(*both.reference), "trained on");
}

} // namespace

TEST(Forked, AChildHasWhatItsParentHadOrAnErrorAndChangesNothing) {
  run_processes(2, [](Rank& rank) {
    const auto shard = [&](const FullyShardOptions& options) {
      return [=](torch::nn::Sequential& model) { fully_shard(model, options); };
    };
    fork_while_training(rank, shard(sharded_on(rank)), "rows", true);
    fork_while_training(rank, shard(sharded_on(rank).reshard_after_forward(false)), "kept", true);
    fork_while_training(rank, shard(sharded_on(rank).layout(ShardLayout::flat)), "flat", true);
    fork_while_training(
        rank, [&](torch::nn::Sequential& model) { replicate(model, ReplicateOptions().mesh(rank.mesh())); },
        "replicate", false);
  });
}

TEST(Forked, AChildComputesWithNoPiecesAndRunsNoPipeline) {
  run_processes(2, [](Rank& rank) {
    auto pieces = stage_model(0);
    parallelize(pieces, rank.mesh({{"tp", 2}}), "tp", {{"in_proj", colwise()}, {"out_proj", rowwise()}});
    Mlp stage{nullptr};
    Pipeline pipeline(
        rank.mesh({{"pp", 2}}), "pp", [&](int64_t number) { return PipelineStage(stage = stage_model(number)); },
        options_of(kSchedules[1], 2));
    const auto x = rows_of(0, 0, 4);
    const auto train = [&] {
      pieces->forward(x).sum().backward();
      pipeline.step({x}, {x});
    };
    train();
    in_child(rank, [&] {
      const torch::NoGradGuard guard;
      const auto problem = expect_refused([&] { pieces->forward(x); });
      return problem.empty() ? expect_refused([&] { pipeline.evaluate({x}); }) : problem;
    });
    train();
  });
}

TEST(Forked, ASaveUnderWayIsTheParents) {
  run_processes(1, [](Rank& rank) {
    const TemporaryFolder folder;
    const auto model = stage_model(0);
    const auto save = std::make_unique<saves::BackgroundSave>();
    const auto begin = [&](saves::BackgroundSave& by, files::Disk& disk, const std::string& name) {
      auto given = saves::module_save(*model, nullptr, SaveOptions().mesh(rank.mesh()));
      by.begin(
          given.ranks, saves::ranks_on_save_groups(rank.mesh()), disk, folder / name, given.pieces,
          std::move(given.about));
    };
    FaultyDisk counted(files::Disk::real());
    begin(*save, counted, "counted");
    save->wait();
    FaultyDisk disk(files::Disk::real(), place_of("create ", counted.steps()), FaultyDisk::Fault::waits);
    std::promise<void> gate;
    disk.meanwhile = [opened = gate.get_future().share()] { opened.wait(); };
    begin(*save, disk, "step");
    for (const bool asks : {true, false}) {
      in_child(rank, [&]() -> std::string {
        if (save->is_under_way()) return "a save is under way";
        if (asks) {
          if (const auto problem = expect_refused([&] { save->wait(); }); !problem.empty()) return problem;
          save->wait();
        }
        save->~BackgroundSave();
        return "";
      });
    }
    EXPECT_TRUE(save->is_under_way());
    gate.set_value();
    save->wait();
    const auto other = stage_model(1);
    load(folder / "step", other);
    assert_close(other->in_proj->weight.detach(), model->in_proj->weight.detach(), "what was saved");
  });
}

} // namespace shardwise::test
