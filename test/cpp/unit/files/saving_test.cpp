#include "files/names.h"
#include "files/place.h"
#include "support/form.h"
#include "unit/files/faulty_disk.h"
#include "unit/files/memory_disk.h"
#include "unit/files/values.h"

#include <catch2/catch.hpp>

#include <cerrno>

using namespace shardwise::files;
using namespace shardwise::test;
using shardwise::Error;
using shardwise::ValueError;
using Fault = FaultyDisk::Fault;

namespace {

constexpr const char* kPlace = "runs/step-1";

enum class Outcome { saved, failed, died };

/// Saves over a disk of which one operation goes wrong.
Outcome save_with_fault(MemoryDisk& disk, int64_t at, Fault fault) {
  FaultyDisk faulty(disk, at, fault);
  try {
    some_values(2).save(faulty, kPlace);
  } catch (const Error&) {
    return Outcome::failed;
  } catch (const Crash&) {
    return Outcome::died;
  }
  return Outcome::saved;
}

/// Which values the place has; 0 if there is no checkpoint.
int values_there(MemoryDisk& disk) {
  try {
    for (const int seed : {1, 2}) {
      if (some_values(seed).are_in(disk, kPlace)) return seed;
    }
  } catch (const Error& error) {
    const std::string text = error.what();
    if (text.find("there is no checkpoint") != std::string::npos) return 0;
    FAIL_CHECK(text);
  }
  return -1;
}

/// A disk on which values 1 were saved before, or nothing.
std::unique_ptr<MemoryDisk> disk_before(bool has_checkpoint, bool can_exchange) {
  MemoryDisk disk;
  disk.can_exchange = can_exchange;
  if (has_checkpoint) some_values(1).save(disk, kPlace);
  return disk.copy();
}

std::vector<std::string> steps_of_a_save(bool has_checkpoint = true, bool can_exchange = true) {
  const auto disk = disk_before(has_checkpoint, can_exchange);
  FaultyDisk counted(*disk);
  some_values(2).save(counted, kPlace);
  return counted.steps();
}

/// Whatever happened, the next save works, and beside its checkpoint there is nothing that is not known as a leftover.
void check_goes_on(MemoryDisk& disk) {
  some_values(2).save(disk, kPlace);
  REQUIRE(values_there(disk) == 2);
  for (const auto& name : disk.list("runs")) {
    const bool known = name == "step-1" || parse_temporary_name(name).has_value();
    REQUIRE(known);
  }
}

} // namespace

TEST_CASE("checkpoint saving: after a fault at any point the last checkpoint or the new one is there, whole") {
  const auto seeds = by_form<int64_t>(3, 20);
  int tried = 0;
  for (const bool has_checkpoint : {false, true}) {
    for (const bool can_exchange : {true, false}) {
      const auto steps = steps_of_a_save(has_checkpoint, can_exchange);
      for (int64_t at = 0; at < static_cast<int64_t>(steps.size()); ++at) {
        for (const auto fault :
             {Fault::fails, Fault::fails_when_done, Fault::full, Fault::short_count, Fault::crashes,
              Fault::crashes_when_done}) {
          // -1: the process dies and the machine does not.
          for (int64_t seed = -1; seed < seeds; ++seed) {
            const auto disk = disk_before(has_checkpoint, can_exchange);
            const auto outcome = save_with_fault(*disk, at, fault);
            CAPTURE(
                has_checkpoint, can_exchange, steps[at], at, static_cast<int>(fault), seed, static_cast<int>(outcome));
            if (fault == Fault::short_count) REQUIRE(outcome == Outcome::saved);
            const bool dies = fault == Fault::crashes || fault == Fault::crashes_when_done;
            REQUIRE((outcome == Outcome::died) == dies);
            if (seed >= 0) disk->lose_power(static_cast<uint64_t>(seed));
            const auto found = values_there(*disk);
            if (outcome == Outcome::saved) {
              REQUIRE(found == 2);
            } else {
              const bool is_whole = found == 2 || found == (has_checkpoint ? 1 : 0);
              REQUIRE(is_whole);
            }
            check_goes_on(*disk);
            ++tried;
          }
        }
      }
    }
  }
  CHECK(tried > 3000);
}

TEST_CASE("checkpoint saving: a save that fails leaves nothing behind") {
  const auto steps = steps_of_a_save();
  int64_t at = 0;
  for (; steps[at].find("exchange") == std::string::npos; ++at) {
    const auto disk = disk_before(true, true);
    CAPTURE(steps[at]);
    if (save_with_fault(*disk, at, Fault::fails) == Outcome::failed && steps[at].find("make_folder") != 0)
      CHECK(disk->list("runs") == std::vector<std::string>{"step-1"});
  }
  CHECK(at > 20);
}

TEST_CASE("checkpoint saving: after an error that hides an exchange, the last checkpoint is not removed") {
  const auto steps = steps_of_a_save();
  auto at = place_of("exchange", steps);
  const auto disk = disk_before(true, true);
  CHECK(save_with_fault(*disk, at, Fault::fails_when_done) == Outcome::failed);
  const auto left = leftovers(*disk, "runs");
  REQUIRE(left.size() == 1);
  CHECK(some_values(1).are_in(*disk, left[0].path));
  CHECK(values_there(*disk) == 2);
}

TEST_CASE("checkpoint saving: what cannot be removed of the one before does not spoil the new one") {
  const auto steps = steps_of_a_save();
  auto at = place_of("exchange", steps);
  // The one before loses its marker before anything else.
  at = place_of("remove_file", steps, at);
  CHECK(name_of(steps[at]) == "shardwise.json");
  const auto disk = disk_before(true, true);
  CHECK(save_with_fault(*disk, at, Fault::fails) == Outcome::saved);
  CHECK(values_there(*disk) == 2);
  CHECK(leftovers(*disk, "runs").size() == 1);
}

TEST_CASE("checkpoint saving: the one before goes only when the new one will survive, even if others clean up") {
  const auto steps = steps_of_a_save();
  auto at = place_of("exchange", steps);
  for (uint64_t seed = 0; seed < 20; ++seed) {
    const auto disk = disk_before(true, true);
    CHECK(save_with_fault(*disk, at, Fault::crashes_when_done) == Outcome::died);
    const auto left = leftovers(*disk, "runs").at(0);
    auto dead = left.name.owner;
    dead.process = int64_t{1} << 40;
    disk->rename(left.path, temporary_path(kPlace, TemporaryKind::saving, dead));
    CHECK(remove_dead_leftovers(*disk, "runs").size() == 1);
    disk->lose_power(seed);
    CAPTURE(seed);
    REQUIRE(values_there(*disk) > 0);
  }
}

TEST_CASE("checkpoint saving: a rank that still writes keeps nothing of a save that failed") {
  const auto shard = [](const Saving& saving, int64_t number) {
    return saving.folder + "/" + tensor_file_name(number, 1, 1);
  };
  MemoryDisk inner;
  int64_t steps = 0;
  for (int64_t at = 0; at <= steps; ++at) {
    CAPTURE(at);
    const auto saving = begin_saving(inner, kPlace);
    inner.create(shard(saving, 1));
    FaultyDisk disk(inner, at, Fault::waits);
    // Once the folder is gone, it fails.
    disk.meanwhile = [&] { inner.create(shard(saving, 2)); };
    abandon_saving(disk, saving);
    CHECK(inner.list("runs").empty());
    steps = static_cast<int64_t>(disk.steps().size()) - 1;
  }
  CHECK(steps > 3);
}

TEST_CASE("checkpoint saving: files that others put beside those of a save stay") {
  MemoryDisk disk;
  const auto saving = begin_saving(disk, kPlace);
  write_shard(disk, saving.folder, 1, some_values(1).shard(0));
  disk.create(saving.folder + "/notes.txt");
  abandon_saving(disk, saving);
  CHECK(disk.list(saving.folder) == std::vector<std::string>{"notes.txt"});
}

TEST_CASE("checkpoint saving: two saves to one name leave one of them, whole") {
  for (const bool has_checkpoint : {false, true}) {
    for (const bool can_exchange : {true, false}) {
      const auto steps = steps_of_a_save(has_checkpoint, can_exchange);
      for (int64_t at = 0; at < static_cast<int64_t>(steps.size()); ++at) {
        const auto disk = disk_before(has_checkpoint, can_exchange);
        CAPTURE(has_checkpoint, can_exchange, steps[at], at);
        FaultyDisk faulty(*disk, at, Fault::waits);
        faulty.meanwhile = [&] { some_values(1).save(*disk, kPlace); };
        try {
          // The last one to change places with what was there.
          some_values(2).save(faulty, kPlace);
          REQUIRE(values_there(*disk) > 0);
        } catch (const Error&) {
          // Only where folders cannot change places may one be in the way of the other.
          REQUIRE_FALSE(can_exchange);
          REQUIRE(values_there(*disk) == 1);
        }
        disk->lose_power(static_cast<uint64_t>(at));
        REQUIRE(values_there(*disk) > 0);
      }
    }
  }
}

TEST_CASE("checkpoint saving: what is not of a checkpoint is not replaced") {
  MemoryDisk disk;
  const auto values = some_values(1);
  disk.make_folder("notes");
  disk.create("notes/diary.txt");
  CHECK_THROWS_WITH(values.save(disk, "notes"), Catch::Contains("'diary.txt' is not of a checkpoint of shardwise's"));
  disk.make_folder("weights");
  disk.create("weights/model.safetensors");
  CHECK_THROWS_AS(values.save(disk, "weights"), ValueError);
  disk.create("file");
  CHECK_THROWS_WITH(values.save(disk, "file"), Catch::Contains("file, which is a file. Name another place"));
  for (const auto* place : {"", ".", "..", "x/..", "/"}) CHECK_THROWS_AS(values.save(disk, place), ValueError);
  CHECK_THROWS_AS(values.save(disk, temporary_path("x", TemporaryKind::saving, Owner::next())), ValueError);

  // Put there while the save was under way.
  values.save(disk, "step");
  const auto saving = begin_saving(disk, "step");
  disk.create("step/config.json");
  Marker marker;
  marker.files = write_shard(disk, saving.folder, 1, values.shard(0));
  CHECK_THROWS_WITH(commit_saving(disk, saving, marker), Catch::Contains("'config.json' is not of a checkpoint"));
  abandon_saving(disk, saving);
  CHECK(values.are_in(disk, "step"));
  CHECK(disk.kind("step/config.json"));
  CHECK(disk.list(".") == std::vector<std::string>{"file", "notes", "step", "weights"});

  disk.make_folder("empty");
  values.save(disk, "empty");
  values.save(disk, "new/folders/step/");
  CHECK(values.are_in(disk, "new/folders/step"));
  values.save(disk, ".hidden");
  CHECK(values.are_in(disk, ".hidden"));
}

TEST_CASE("checkpoint saving: a commit needs the files that the ranks recorded") {
  MemoryDisk disk;
  const auto values = some_values(1);
  const auto saving = begin_saving(disk, "step");
  Marker marker;
  marker.files = write_shard(disk, saving.folder, 1, values.shard(0));
  auto other = marker;
  other.files[0].name = tensor_file_name(2, 1, 1);
  CHECK_THROWS_WITH(
      commit_saving(disk, saving, other), Catch::Contains("the checkpoint step cannot be completed") &&
                                              Catch::Contains("shard-00002-model-00001-of-00001"));
  disk.content(saving.folder + "/" + marker.files[0].name) += "x";
  CHECK_THROWS_WITH(commit_saving(disk, saving, marker), Catch::Contains("were saved"));
  CHECK_FALSE(disk.kind("step"));
  CHECK_THROWS_WITH(SavedFolder(disk, saving.folder), Catch::Contains("never completed"));
}

TEST_CASE("checkpoint saving: only leftovers of processes that have surely ended are removed") {
  MemoryDisk disk;
  some_values(1).save(disk, "runs/a");
  some_values(1).save(disk, "runs/c");
  for (const auto* place : {"runs/old", "runs/older"}) some_values(2).save(disk, place);
  const auto living = Owner::next();
  auto dead = living;
  // No process has this number.
  dead.process = int64_t{1} << 40;
  auto elsewhere = dead;
  elsewhere.host ^= 1;
  // This process, but its number belonged to another one before.
  auto earlier = living;
  earlier.began += 1;
  for (const auto& owner : {living, dead, elsewhere, earlier}) {
    disk.make_folder(temporary_path("runs/a", TemporaryKind::saving, owner));
    disk.create(temporary_path("runs/a", TemporaryKind::saving, owner) + "/shardwise.json.new");
    disk.make_folder(temporary_path("runs/a", TemporaryKind::removing, owner));
  }
  // Replaced, and something new at its place; nothing; or something that is no checkpoint.
  disk.rename("runs/old", temporary_path("runs/a", TemporaryKind::replaced, dead));
  disk.rename("runs/older", temporary_path("runs/b", TemporaryKind::replaced, dead));
  disk.rename("runs/c", temporary_path("runs/c", TemporaryKind::replaced, dead));
  disk.make_folder("runs/c");
  disk.make_folder("runs/other.saving-1");
  CHECK(leftovers(disk, "runs").size() == 11);
  CHECK(some_values(2).are_in(disk, "runs/b"));

  const auto removed = remove_dead_leftovers(disk, "runs");
  CHECK(removed.size() == 5);
  for (const auto& path : removed) CHECK(path.find("runs/a.") == 0);
  std::vector<std::string> left;
  for (const auto& leftover : leftovers(disk, "runs")) left.push_back(leftover.path);
  CHECK(left.size() == 5);
  for (const auto& owner : {living, elsewhere})
    CHECK(disk.kind(temporary_path("runs/a", TemporaryKind::saving, owner)));
  CHECK(some_values(1).are_in(disk, "runs/a"));
  CHECK(some_values(2).are_in(disk, "runs/b"));
  CHECK(disk.kind("runs/b"));
  CHECK(some_values(1).are_in(disk, temporary_path("runs/c", TemporaryKind::replaced, dead)));
  CHECK(disk.kind("runs/other.saving-1"));
}

TEST_CASE("checkpoint saving: a replaced checkpoint of two dead saves is not guessed") {
  MemoryDisk disk;
  for (int i = 0; i < 2; ++i) {
    some_values(1).save(disk, "step");
    disk.rename("step", temporary_path("step", TemporaryKind::replaced, Owner::next()));
  }
  CHECK_THROWS_WITH(SavedFolder(disk, "step"), Catch::Contains("was being replaced more than once"));
}

TEST_CASE("checkpoint saving: a replaced checkpoint that is not whole is none") {
  MemoryDisk disk;
  some_values(1).save(disk, "step");
  disk.remove_file("step/" + tensor_file_name(1, 1, 1));
  disk.rename("step", temporary_path("step", TemporaryKind::replaced, Owner::next()));
  CHECK_THROWS_WITH(SavedFolder(disk, "step"), Catch::Contains("there is no checkpoint step"));
}

TEST_CASE("checkpoint saving: the name of a folder aside tells its owner") {
  const auto owner = Owner::next();
  CHECK(Owner::next().count == owner.count + 1);
  CHECK_FALSE(owner.has_ended());
  const auto name = name_of(temporary_path("a/step.saving-9/", TemporaryKind::replaced, owner));
  const auto parsed = parse_temporary_name(name);
  REQUIRE(parsed);
  CHECK(parsed->place == "step.saving-9");
  CHECK(parsed->owner == owner);
  for (const auto* text :
       {"", "step", "step.saving-", "step.saving-1-2-3-4", "step.saving-0123456789abcdef-1-2",
        "step.saving-0123456789abcdef-1-2-3-4", "step.saving-0123456789abcdef-1--2-3",
        ".saving-0123456789abcdef-1-2-3"}) {
    CAPTURE(text);
    CHECK_FALSE(parse_temporary_name(text));
  }
}
