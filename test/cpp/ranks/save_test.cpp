// save() and load(): what any ranks saved, any others load; and what goes wrong is told before anything changes.
#include "ranks/saved_models.h"
#include "saves/pieces.h"
#include "saves/ranks.h"
#include "support/expect.h"
#include "support/folder.h"
#include "support/variables.h"

#include <cmath>
#include <fstream>

namespace shardwise::test {
namespace {

void write_to(const std::string& path, int64_t offset, char byte) {
  std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
  file.seekp(offset);
  file.put(byte);
}

std::string one_file(const std::string& folder) {
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    if (entry.path().extension() == ".safetensors") return entry.path();
  }
  throw std::runtime_error("no file in " + folder);
}

/// On each of two ranks: a sharded model, which was saved to `path`.
void with_saved(const std::function<void(Rank&, Stack& model, const std::string& path)>& act) {
  const TemporaryFolder folder;
  run_ranks(2, [&](Rank& rank) {
    Stack model;
    shard_stack(model, sharded_on(rank));
    save(folder / "step", model);
    act(rank, model, folder / "step");
  });
}

} // namespace

TEST(Save, AnyDivisionLoadsWhatAnyOtherSaved) {
  const TemporaryFolder folder;
  for (const auto& from : saved_divisions()) {
    const auto path = folder / from.name;
    Whole saved;
    run_ranks(from.world, [&](Rank& rank) {
      Training training(rank, from, 0.02);
      training.train(0, 3);
      save(path, training.model, training.optimizer, SaveOptions().values({{"step", int64_t{3}}, {"loss", 0.25}}));
      auto whole = training.whole();
      if (rank.rank() == 0) saved = std::move(whole);
    });
    // Not to all in the short form: each to another one, and to itself.
    const auto& all = saved_divisions();
    const auto position = static_cast<size_t>(&from - all.data());
    for (size_t i = 0; i < by_form<size_t>(2, all.size()); ++i) {
      const auto& to = all[(position + i) % all.size()];
      SCOPED_TRACE(c10::str("from ", from.name, " to ", to.name));
      run_ranks(to.world, [&](Rank& rank) {
        Training training(rank, to, 0.5);
        const auto loaded = load(path, training.model, training.optimizer);
        EXPECT_EQ(loaded.values, (SavedValues{{"step", int64_t{3}}, {"loss", 0.25}}));
        expect_same(training.whole(), saved);
        training.train(3, 4);
      });
    }
  }
}

TEST(Save, AResumedRunGoesOnBitForBit) {
  const TemporaryFolder folder;
  for (const auto& division : saved_divisions()) {
    SCOPED_TRACE(division.name);
    const auto path = folder / "step";
    Whole straight;
    run_ranks(division.world, [&](Rank& rank) {
      Training training(rank, division, 0.02);
      training.train(0, 3);
      save(path, training.model, training.optimizer);
      training.train(3, 6);
      auto whole = training.whole();
      if (rank.rank() == 0) straight = std::move(whole);
    });
    run_ranks(division.world, [&](Rank& rank) {
      Training training(rank, division, 0.02);
      // What a kept full copy, or state from before, would leave behind.
      training.train(7, 9);
      load(path, training.model, training.optimizer);
      training.train(3, 6);
      expect_same(training.whole(), straight);
    });
  }
}

TEST(Save, DtypesAndTheProgramsTensors) {
  const TemporaryFolder folder;
  for (const auto dtype : {at::kDouble, at::kBFloat16, at::kHalf}) {
    run_ranks(2, [&](Rank& rank) {
      const auto make = [&](bool ignores) {
        Stack model;
        model->to(dtype);
        model->register_buffer("mask", torch::tensor({true, false, true}));
        auto options = sharded_on(rank);
        if (ignores) options.ignored_parameters({model->head->weight});
        shard_stack(model, options);
        return model;
      };
      auto model = make(true);
      StateDict tensors;
      tensors.insert("common", torch::arange(4));
      tensors.insert(c10::str("of rank ", rank.rank()), torch::full({2}, rank.rank()));
      save(
          folder / "step", model,
          SaveOptions().tensors(tensors).values({{"name", std::string("a")}, {"best", INFINITY}}));
      // Into a model that ignores the same parameter, and one that shards it.
      for (const bool ignores : {true, false}) {
        auto other = make(ignores);
        forget(*other);
        const auto loaded = load(folder / "step", other);
        expect_same(full_state_dict(other), full_state_dict(model));
        EXPECT_EQ(loaded.tensors.size(), 3);
        EXPECT_TRUE(at::equal(loaded.tensors["common"], torch::arange(4).cpu()));
        EXPECT_TRUE(at::equal(loaded.tensors["of rank 1"], torch::full({2}, 1).cpu()));
        EXPECT_EQ(std::get<std::string>(loaded.values.at("name")), "a");
        EXPECT_EQ(std::get<double>(loaded.values.at("best")), INFINITY);
      }
    });
  }
}

TEST(Save, WhatDoesNotFitIsToldBeforeAnythingChanges) {
  with_saved([](Rank& rank, Stack& model, const std::string& path) {
    const auto refuses = [&](Stack other, const std::vector<std::string>& parts) {
      shard_stack(other, sharded_on(rank));
      const auto before = full_state_dict(other);
      expect_error<Error>([&] { load(path, other); }, parts);
      expect_same(full_state_dict(other), before);
    };
    refuses(Stack(6, 4), {"nothing was loaded", "missing in the checkpoint: blocks.3.up.weight"});
    refuses(Stack(6, 2), {"neither in the module nor in the optimizer: blocks.2."});
    refuses(Stack(8), {"'embedding.weight' has shape [11, 8] here and [11, 6] there"});
    Stack halves;
    halves->to(at::kHalf);
    refuses(halves, {"is float16 here and float32 there"});
    Stack more(6, 4);
    shard_stack(more, sharded_on(rank));
    const auto loaded = load(path, more, LoadOptions().strict(false));
    EXPECT_EQ(loaded.missing.size(), 6);
    torch::optim::AdamW optimizer(model->parameters(), torch::optim::AdamWOptions(0.1));
    expect_error<Error>(
        [&] { load(path, model, optimizer); },
        {"missing in the checkpoint: optimizer.param_groups.embedding.weight.lr"});
    expect_error<Error>([&] { load(path + "/other", model); }, {path + "/other"});
  });
}

TEST(Save, ARankThatFailsFailsOnAllAndWhatWasThereStays) {
  const TemporaryFolder folder;
  const auto path = folder / "step";
  run_ranks(3, [&](Rank& rank) {
    Stack model;
    shard_stack(model, sharded_on(rank));
    save(path, model, SaveOptions().values({{"step", int64_t{1}}}));
    StateDict tensors;
    // No file of safetensors can have it.
    if (rank.rank() == 1) tensors.insert("quantized", torch::empty({2}, at::kBits8));
    expect_error<std::exception>([&] { save(path, model, SaveOptions().tensors(tensors)); }, {"program.quantized"});
    expect_error<Error>(
        [&] {
          save(path, model, SaveOptions().values({{"step", int64_t{rank.rank()}}}));
        },
        {"rank 1 saves a checkpoint with the values {\"step\": 1} to ", ", but rank 0"});
    const std::string broken = rank.rank() == 1 ? "\xff" : "";
    expect_error<Error>([&] { save(path, model, SaveOptions().values({{"text", broken}})); }, {"is not valid UTF-8"});
    const auto other = torch::zeros({rank.rank() + 1});
    StateDict sizes;
    sizes.insert("sizes", other);
    expect_error<Error>(
        [&] { save(path, model, SaveOptions().tensors(sizes)); },
        {"'program.sizes' is F32 of [1] on rank 0, but F32 of [2] on rank 1"});
    EXPECT_EQ(std::get<int64_t>(load(path, model).values.at("step")), 1);
  });
  EXPECT_EQ(folder.names(), std::set<std::string>{"step"});
}

TEST(Save, ABrokenFileIsNamedOnAllRanks) {
  std::string broken;
  with_saved([&](Rank& rank, Stack& model, const std::string& path) {
    if (rank.rank() == 0) {
      broken = one_file(path);
      write_to(broken, static_cast<int64_t>(std::filesystem::file_size(broken)) - 1, '\x55');
    }
    rank.mesh().barrier();
    expect_error<Error>([&] { load(path, model); }, {std::filesystem::path(broken).filename().string()});
  });
}

TEST(Save, OneThatLostItsMarkerIsRefused) {
  with_saved([](Rank& rank, Stack& model, const std::string& path) {
    EXPECT_FALSE(load(path, model, LoadOptions().allow_unverified(false)).unverified);
    rank.mesh().barrier();
    if (rank.rank() == 0) std::filesystem::remove(path + "/shardwise.json");
    rank.mesh().barrier();
    expect_error<Error>([&] { load(path, model, LoadOptions().strict(false)); }, {"its shardwise.json is missing"});
  });
}

TEST(Save, OneFileOfSafetensors) {
  const TemporaryFolder folder;
  for (const auto& division : saved_divisions()) {
    SCOPED_TRACE(division.name);
    const auto file = folder / "out/model.safetensors";
    run_ranks(division.world, [&](Rank& rank) {
      Training training(rank, division, 0.02);
      if (division.world > 1) {
        const auto own = c10::str(file, "-", rank.rank());
        expect_error<Error>(
            [&] { export_safetensors(own, training.model); }, {"rank 1 writes " + file + "-1, but rank 0 writes"});
      }
      expect_error<std::exception>([&] { export_safetensors(folder.path(), training.model); }, {"which is a folder"});
      export_safetensors(file, training.model);
      const auto whole = full_state_dict(training.model);
      Training other(rank, division, 0.02);
      other.train(0, 2);
      const auto loaded = load(folder / "out", other.model);
      EXPECT_TRUE(loaded.unverified);
      expect_same(full_state_dict(other.model), whole);
      expect_error<Error>(
          [&] { load(folder / "out", other.model, LoadOptions().allow_unverified(false)); },
          {"has no shardwise.json: another program wrote it"});
      rank.mesh().barrier();
    });
    EXPECT_EQ(folder.names(), std::set<std::string>{"out"});
    EXPECT_EQ(std::distance(std::filesystem::directory_iterator(folder / "out"), {}), 1);
  }
}

TEST(Save, RanksThatNameDifferentFolders) {
  const TemporaryFolder folder;
  run_ranks(2, [&](Rank& rank) {
    Stack model;
    shard_stack(model, sharded_on(rank));
    const auto own = folder / c10::str("step-", rank.rank());
    expect_error<Error>(
        [&] { save(own, model); }, {"rank 1 saves", "to " + (folder / "step-1"), "but rank 0", folder / "step-0"});
    AsyncSaver saver;
    expect_error<Error>([&] { saver.save(own, model); }, {"to " + (folder / "step-1")});
    save(folder / "step-0", model);
    expect_error<Error>(
        [&] { load(own, model); },
        {"rank 1 loads " + (folder / "step-1") + ", but rank 0 loads " + (folder / "step-0")});
    load(folder / (rank.rank() == 0 ? "step-0" : "step-0/"), model);
  });
}

TEST(Save, RanksThatFindWhatDifferentSavesWrote) {
  with_saved([](Rank& rank, Stack&, const std::string& path) {
    const auto ranks = saves::ranks_on(rank.mesh(), "a test");
    int count = 0;
    const saves::Ranks slow(rank.rank(), 2, [&](const std::string& mine) {
      const bool is_first = count++ == 0;
      if (!is_first && rank.rank() == 0) rank.mesh().barrier();
      auto texts = ranks.together([&] { return mine; });
      if (is_first && rank.rank() == 1) {
        // Once the first rank has looked.
        rank.mesh().barrier();
        save(path, Stack());
      }
      return texts;
    });
    expect_error<Error>(
        [&] { saves::open_checkpoint(slow, path); }, {"rank 1 finds another checkpoint at " + path + " than rank 0"});
  });
}

TEST(Save, TheNewestSteps) {
  const TemporaryFolder folder;
  const auto root = folder / "run";
  EXPECT_FALSE(newest_step(root));
  run_ranks(2, [&](Rank& rank) {
    Stack model;
    shard_stack(model, sharded_on(rank));
    for (const int64_t step : {5, 10, 100}) save(step_folder(root, step), model);
    rank.mesh().barrier();
    EXPECT_EQ(newest_step(root)->step, 100);
    rank.mesh().barrier();
    if (rank.rank() == 0) {
      EXPECT_EQ(keep_newest_steps(root, 2), std::vector<std::string>{root + "/step-5"});
    }
    rank.mesh().barrier();
    // A save that died before its end.
    if (rank.rank() == 0) std::filesystem::remove(newest_step(root)->folder + "/shardwise.json");
    rank.mesh().barrier();
    EXPECT_EQ(newest_step(root)->step, 10);
    load(newest_step(root)->folder, model);
  });
}

TEST(Save, APlainModuleOfSeveralRanks) {
  const TemporaryFolder folder;
  const auto path = folder / "step";
  run_ranks(2, [&](Rank& rank) {
    Stack model;
    save(path, model, SaveOptions().mesh(rank.mesh()));
    Stack other;
    forget(*other);
    load(path, other, LoadOptions().mesh(rank.mesh()));
    expect_same(full_state_dict(other), full_state_dict(model));
  });
}

TEST(Save, APlainModuleOfSeveralRanksNeedsAMesh) {
  const TemporaryFolder folder;
  const Variables world({{"WORLD_SIZE", "2"}, {"RANK", "1"}, {"MASTER_ADDR", "localhost"}, {"MASTER_PORT", "1234"}});
  Stack model;
  expect_error<ValueError>([&] { save(folder / "step", model); }, {"the program has 2 ranks", "mesh()"});
  EXPECT_FALSE(std::filesystem::exists(folder / "step"));
}

} // namespace shardwise::test
