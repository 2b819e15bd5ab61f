// AsyncSaver: what was there at the call is written while training goes on; an error comes with the next call, on all
// ranks.
#include "ranks/saved_models.h"
#include "saves/background_save.h"
#include "saves/ranks.h"
#include "saves/save.h"
#include "support/expect.h"
#include "support/folder.h"
#include "support/processes.h"
#include "unit/files/faulty_disk.h"

#include <atomic>
#include <future>

namespace shardwise::test {
namespace {

using Fault = FaultyDisk::Fault;

/// Saves of a model over disks on which something happens.
class OnDisk {
 public:
  OnDisk(Stack& model, const Mesh& mesh) : model_(model), beside_(saves::ranks_on_save_groups(mesh)) {}

  void begin(FaultyDisk& disk, const std::string& path) {
    auto save = saves::module_save(*model_, nullptr, SaveOptions());
    background_.begin(save.ranks, beside_, disk, path, save.pieces, std::move(save.about));
  }
  /// The number of this rank's operation that begins to write its file.
  int64_t first_file(const std::string& path) {
    FaultyDisk disk(files::Disk::real());
    begin(disk, path);
    background_.wait();
    return place_of("create", disk.steps());
  }
  saves::BackgroundSave& background() {
    return background_;
  }

 private:
  Stack& model_;
  saves::Ranks beside_;
  saves::BackgroundSave background_;
};

} // namespace

TEST(AsyncSaver, WhatWasThereAtTheCallIsWritten) {
  for (const auto& division : saved_divisions()) {
    SCOPED_TRACE(division.name);
    const TemporaryFolder folder;
    run_ranks(division.world, [&](Rank& rank) {
      Training training(rank, division, 0.02);
      AsyncSaver saver;
      std::vector<Whole> expected;
      for (int step = 0; step < 3; ++step) {
        // At first the optimizer keeps nothing; then all is as the time before.
        if (step > 0) training.train(step, step + 1);
        saver.save(
            step_folder(folder / "run", step), training.model, training.optimizer,
            SaveOptions().values({{"step", int64_t{step}}}));
        expected.push_back(training.whole());
      }
      training.train(3, 4);
      saver.wait();
      EXPECT_FALSE(saver.is_saving());
      for (int step = 0; step < 3; ++step) {
        Training other(rank, division, 0.5);
        const auto loaded = load(step_folder(folder / "run", step), other.model, other.optimizer);
        EXPECT_EQ(std::get<int64_t>(loaded.values.at("step")), step);
        expect_same(other.whole(), expected[static_cast<size_t>(step)]);
      }
    });
  }
}

TEST(AsyncSaver, TrainingGoesOnWhileItIsWritten) {
  const TemporaryFolder folder;
  run_ranks(2, [&](Rank& rank) {
    Training training(rank, saved_divisions().at(1), 0.02);
    OnDisk saves(training.model, rank.mesh());
    FaultyDisk disk(files::Disk::real(), saves.first_file(folder / "first"), Fault::waits);
    std::promise<void> gate;
    disk.meanwhile = [opened = gate.get_future().share()] { opened.wait(); };
    saves.begin(disk, folder / "step");
    const auto expected = training.whole();
    training.train(0, 3);
    EXPECT_TRUE(saves.background().is_under_way());
    gate.set_value();
    saves.background().wait();
    EXPECT_FALSE(saves.background().is_under_way());
    load(folder / "step", training.model);
    expect_same(training.whole().model, expected.model);
  });
}

TEST(AsyncSaver, AFailureIsRaisedOnAllRanksByTheNextCall) {
  const TemporaryFolder folder;
  run_ranks(3, [&](Rank& rank) {
    Training training(rank, saved_divisions().at(2), 0.02);
    OnDisk saves(training.model, rank.mesh());
    const auto first_file = saves.first_file(folder / "step");
    for (const bool waits : {true, false}) {
      FaultyDisk disk(files::Disk::real(), first_file, rank.rank() == 1 ? Fault::fails : Fault::none);
      saves.begin(disk, folder / "step");
      FaultyDisk well(files::Disk::real());
      expect_error<Error>(
          [&] { waits ? saves.background().wait() : saves.begin(well, folder / "step"); }, {"shard-00002"});
      saves.background().wait();
    }
    load(folder / "step", training.model);
    training.train(0, 2);
    FaultyDisk well(files::Disk::real());
    saves.begin(well, folder / "step");
    const auto expected = training.whole();
    saves.background().wait();
    training.train(2, 3);
    load(folder / "step", training.model);
    expect_same(training.whole().model, expected.model);
  });
  EXPECT_EQ(folder.names(), std::set<std::string>{"step"});
}

TEST(AsyncSaver, AnExchangeThatFailsLeavesTheLastCheckpointOrTheNew) {
  // The ranks talk six times; between the last two the first one commits. One of these fails on some ranks, and from
  // then on nobody hears of the others.
  enum class When : uint8_t { before, after_on_all, after_on_the_first, after_on_others };
  constexpr int kLast = 5;
  for (int at = 0; at <= kLast + 1; ++at) {
    for (const auto when : {When::before, When::after_on_all, When::after_on_the_first, When::after_on_others}) {
      SCOPED_TRACE(c10::str("exchange ", at, ", case ", static_cast<int>(when)));
      const TemporaryFolder folder;
      std::atomic<bool> is_lost = false;
      run_ranks(3, [&](Rank& rank) {
        Training training(rank, saved_divisions().at(2), 0.02);
        save(folder / "step", training.model, SaveOptions().values({{"step", int64_t{1}}}));
        const auto ranks = saves::ranks_on(rank.mesh(), "a test");
        int count = 0;
        const auto exchange = [&](const std::string& mine) {
          const bool is_this = count++ == at;
          if (is_lost || (is_this && when == When::before)) throw PeerError("lost");
          auto texts = ranks.together([&] { return mine; });
          if (!is_this) return texts;
          is_lost = true;
          rank.mesh().barrier();
          if (when == When::after_on_all || (when == When::after_on_the_first) == (rank.rank() == 0)) {
            throw PeerError("lost");
          }
          return texts;
        };
        const saves::Ranks failing(rank.rank(), 3, exchange);
        auto what = saves::module_save(*training.model, nullptr, SaveOptions().values({{"step", int64_t{2}}}));
        const auto act = [&] {
          saves::save_pieces(failing, files::Disk::real(), folder / "step", what.pieces, std::move(what.about));
        };
        if (at > kLast) {
          act();
        } else if (at == kLast && when >= When::after_on_the_first) {
          // Of the last one only those hear that failed.
          if ((when == When::after_on_the_first) == (rank.rank() == 0)) {
            EXPECT_THROW(act(), PeerError);
          } else {
            act();
          }
        } else {
          EXPECT_THROW(act(), PeerError);
        }
        rank.mesh().barrier();
        const bool is_committed = at >= kLast || (at == kLast - 1 && when == When::after_on_others);
        EXPECT_EQ(std::get<int64_t>(load(folder / "step", training.model).values.at("step")), is_committed ? 2 : 1);
      });
      EXPECT_EQ(folder.names(), std::set<std::string>{"step"});
    }
  }
}

TEST(AsyncSaver, OneRankMayHaveSomethingElseTheNextTime) {
  const TemporaryFolder folder;
  run_ranks(3, [&](Rank& rank) {
    // Over process groups that are the program's own.
    const auto mesh = Mesh::from_process_groups({"ranks"}, {rank.mesh().group("world")}, rank.mesh().device());
    Stack model;
    shard_stack(model, FullyShardOptions().mesh(mesh));
    AsyncSaver saver;
    for (const int number : {0, 1, 2, 3}) {
      StateDict tensors;
      tensors.insert("all", torch::full({3}, number));
      if (rank.rank() == 1 && number == 2) tensors.insert("one", torch::full({2}, number));
      saver.save(folder / "step", model, SaveOptions().tensors(tensors));
      saver.wait();
      const auto loaded = load(folder / "step", model);
      EXPECT_EQ(loaded.tensors.size(), number == 2 ? 2 : 1);
      for (const auto& item : loaded.tensors) EXPECT_TRUE(item.value().eq(number).all().item<bool>()) << item.key();
    }
    expect_error<Error>(
        [&] {
          saver.save(folder / "step", model, SaveOptions().values({{"step", int64_t{rank.rank()}}}));
        },
        {"saves a checkpoint with the values"});
  });
}

TEST(AsyncSaver, AFailureThatNobodySawEndsTheProcessWithAnError) {
  constexpr const char* kFolder = "SHARDWISE_TEST_UNSEEN";
  if (const char* place = std::getenv(kFolder)) {
    Stack model;
    const auto save = saves::module_save(*model, nullptr, SaveOptions());
    FaultyDisk counted(files::Disk::real());
    saves::save_pieces(save.ranks, counted, c10::str(place, "-first"), save.pieces, save.about);
    FaultyDisk disk(files::Disk::real(), place_of("create", counted.steps()), Fault::fails);
    saves::BackgroundSave().begin(save.ranks, {}, disk, place, save.pieces, save.about);
    return;
  }
  const TemporaryFolder folder;
  const auto ended = run_commands({this_test({{kFolder, folder / "step"}})}, std::chrono::seconds(60)).front();
  EXPECT_EQ(ended.exit_code, 1) << ended.output;
  EXPECT_NE(ended.output.find("the last save of an AsyncSaver failed"), std::string::npos) << ended.output;
  EXPECT_NE(ended.output.find("PASSED"), std::string::npos) << ended.output;
}

} // namespace shardwise::test
