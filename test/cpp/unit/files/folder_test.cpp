#include "files/merge.h"
#include "files/place.h"
#include "files/steps.h"
#include "files/tensor_header.h"
#include "unit/files/faulty_disk.h"
#include "unit/files/memory_disk.h"
#include "unit/files/values.h"

#include <catch2/catch.hpp>

using namespace shardwise::files;
using namespace shardwise::test;
using shardwise::Error;
using shardwise::ValueError;
using Fault = FaultyDisk::Fault;

namespace {

/// A file with whole tensors of bytes, as Hugging Face's libraries write it: nothing about pieces.
void write_plain(
    MemoryDisk& disk, const std::string& path, const std::vector<std::pair<std::string, std::string>>& tensors) {
  std::vector<TensorToWrite> all;
  for (const auto& [name, text] : tensors) {
    const auto bytes = std::as_bytes(std::span(text));
    const auto box = Box::whole({static_cast<int64_t>(bytes.size())});
    all.push_back({.name = name, .dtype = c10::ScalarType::Byte, .box = box, .data = {bytes}});
  }
  write_tensor_file(disk, path, all, FileKind::whole);
}

void write_index(MemoryDisk& disk, const std::string& folder, const Json& places) {
  const auto path = folder + "/model.safetensors.index.json";
  if (!disk.kind(path)) disk.create(path);
  disk.content(path) = json_text(Json::Object{{"metadata", Json::Object{{"total_size", 4}}}, {"weight_map", places}});
}

std::string read_bytes(MemoryDisk& disk, const std::string& place, const std::string& name) {
  SavedFolder folder(disk, place);
  return bytes_of(folder, name);
}

std::vector<int64_t> steps_of(Disk& disk, const std::string& root) {
  std::vector<int64_t> result;
  for (const auto& step : complete_steps(disk, root)) result.push_back(step.step);
  return result;
}

} // namespace

TEST_CASE("checkpoint folder: those of Hugging Face are read, with an index or without") {
  MemoryDisk disk;
  disk.make_folder("one");
  write_plain(disk, "one/model.safetensors", {{"a", "xyz"}, {"b", "q"}});
  CHECK(read_bytes(disk, "one", "a") == "xyz");
  CHECK(read_bytes(disk, "one/", "b") == "q");
  CHECK_FALSE(SavedFolder(disk, "one").index().marker);
  CHECK_THROWS_WITH(verify_checkpoint(disk, "one"), Catch::Contains("one cannot be verified"));

  disk.make_folder("two");
  write_plain(disk, "two/model-00001-of-00002.safetensors", {{"a", "xyz"}, {"tied", "old"}});
  write_plain(disk, "two/model-00002-of-00002.safetensors", {{"b", "q"}, {"tied", "new"}});
  CHECK_THROWS_WITH(
      SavedFolder(disk, "two"),
      Catch::Contains("of its tensor 'tied' the elements [3] at [0] are there more than once"));
  const std::string first = "model-00001-of-00002.safetensors";
  const std::string second = "model-00002-of-00002.safetensors";
  // The index decides; a file that it does not name is not looked at.
  write_index(disk, "two", Json::Object{{"a", first}, {"b", second}, {"tied", second}});
  disk.create("two/broken.safetensors");
  CHECK(read_bytes(disk, "two", "tied") == "new");
  CHECK(SavedFolder(disk, "two").index().tensors.size() == 3);
  write_index(disk, "two", Json::Object{{"a", second}});
  CHECK_THROWS_WITH(SavedFolder(disk, "two"), Catch::Contains("names 'a', which " + second + " does not have"));
  write_index(disk, "two", Json::Object{{"a", "model-00003-of-00002.safetensors"}});
  CHECK_THROWS_WITH(SavedFolder(disk, "two"), Catch::Contains("two/model-00003-of-00002.safetensors"));
}

TEST_CASE("checkpoint folder: one of ours without its marker is not taken for one of others") {
  MemoryDisk disk;
  some_values(1).save(disk, "step");
  disk.remove_file("step/shardwise.json");
  CHECK_THROWS_WITH(
      SavedFolder(disk, "step"), Catch::Contains("the checkpoint step is broken") &&
                                     Catch::Contains("its shardwise.json is missing") && Catch::Contains("Restore"));
  for (const std::string name : {"program.x", "optimizer.state.w.exp_avg", "optimizer.param_groups.w.lr"}) {
    CAPTURE(name);
    MemoryDisk other;
    other.make_folder("f");
    write_plain(other, "f/model.safetensors", {{name, "x"}});
    CHECK_THROWS_WITH(SavedFolder(other, "f"), Catch::Contains("its shardwise.json is missing"));
  }
}

TEST_CASE("checkpoint folder: of a dtype that torch does not have, only that tensor cannot be read") {
  MemoryDisk disk;
  disk.make_folder("f");
  write_plain(disk, "f/1.safetensors", {{"odd", "xyz"}});
  auto& content = disk.content("f/1.safetensors");
  content.replace(content.find("U8"), 2, "X8");
  write_plain(disk, "f/2.safetensors", {{"good", "abc"}});
  CHECK(read_bytes(disk, "f", "good") == "abc");
  SavedFolder folder(disk, "f");
  CHECK(folder.index().unknown == std::map<std::string, std::string>{{"odd", "X8"}});
  std::vector<std::byte> memory(3);
  CHECK_THROWS_WITH(
      folder.read("odd", Box::whole({3}), memory),
      Catch::Contains("'odd' of the checkpoint f cannot be read") && Catch::Contains("torch has no dtype 'X8'"));
  CHECK_THROWS_WITH(merge_checkpoint(disk, "f", "to", {}, 100), Catch::Contains("'odd'"));
  CHECK(disk.list(".") == std::vector<std::string>{"f"});
}

TEST_CASE("checkpoint folder: one that is replaced while it is read says so, and never gives some of each") {
  for (const bool can_exchange : {true, false}) {
    MemoryDisk saved;
    saved.can_exchange = can_exchange;
    some_values(1).save(saved, "step");
    FaultyDisk counted(saved);
    REQUIRE(some_values(1).are_in(counted, "step"));
    int replaced = 0;
    for (int64_t at = 0; at < static_cast<int64_t>(counted.steps().size()); ++at) {
      CAPTURE(can_exchange, at, counted.steps()[at]);
      const auto disk = saved.copy();
      disk->can_exchange = can_exchange;
      FaultyDisk reading(*disk, at, Fault::waits);
      reading.meanwhile = [&] { some_values(2).save(*disk, "step"); };
      try {
        // What is read is all of one of them.
        const bool is_first = some_values(1).are_in(reading, "step");
        if (!is_first) REQUIRE(some_values(2).are_in(*disk, "step"));
      } catch (const Error& error) {
        CHECK_THAT(error.what(), Catch::Contains("step was replaced by another save while it was being read"));
        ++replaced;
      }
    }
    CHECK(replaced > 3);
  }
}

TEST_CASE("checkpoint folder: an index cannot name files elsewhere") {
  MemoryDisk disk;
  disk.make_folder("f");
  write_plain(disk, "secret.safetensors", {{"a", "xyz"}});
  disk.make_folder("f/sub");
  write_plain(disk, "f/sub/x.safetensors", {{"a", "xyz"}});
  for (const std::string name :
       {"../secret.safetensors", "/secret.safetensors", "sub/x.safetensors", "..", ".", "", "x.txt"}) {
    CAPTURE(name);
    write_index(disk, "f", Json::Object{{"a", name}});
    CHECK_THROWS_WITH(
        SavedFolder(disk, "f"), Catch::Contains("f/model.safetensors.index.json is broken: it says that 'a' is in"));
  }
  write_index(disk, "f", Json::Object{{"a", std::string("x.safetensors\0.safetensors", 26)}});
  CHECK_THROWS_WITH(SavedFolder(disk, "f"), Catch::Contains("is in 'x.safetensors\\x00.safetensors'"));
  write_index(disk, "f", Json::Object{{"a", 1}});
  CHECK_THROWS_WITH(SavedFolder(disk, "f"), Catch::Contains("is in something that is not a string"));
  write_index(disk, "f", Json::List{});
  CHECK_THROWS_WITH(SavedFolder(disk, "f"), Catch::Contains("it has no object weight_map"));
}

TEST_CASE("checkpoint folder: pieces that do not make up a tensor are named") {
  const std::vector<std::byte> bytes(12);
  const auto piece = [&](c10::ScalarType dtype, const Box& box) {
    const auto size = static_cast<size_t>(box.numel()) * c10::elementSize(dtype);
    return std::vector<TensorToWrite>{{.name = "w", .dtype = dtype, .box = box, .data = {Bytes(bytes).first(size)}}};
  };
  const auto error_of = [&](const std::vector<TensorToWrite>& one, const std::vector<TensorToWrite>& other) {
    MemoryDisk disk;
    disk.make_folder("f");
    write_tensor_file(disk, "f/1.safetensors", one);
    write_tensor_file(disk, "f/2.safetensors", other);
    // As torch writes them.
    for (const auto* path : {"f/1.safetensors", "f/2.safetensors"}) {
      auto& content = disk.content(path);
      content.replace(content.find("WRITTEN_BY"), 10, "SOMETHING_");
    }
    try {
      SavedFolder folder(disk, "f");
    } catch (const Error& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  const auto f32 = c10::ScalarType::Float;
  CHECK(error_of(piece(f32, {{0}, {1}}), piece(f32, {{1}, {2}})).empty());
  CHECK_THAT(
      error_of(piece(f32, {{0}, {1}}), piece(f32, {{2}, {2}})),
      Catch::Contains("of its tensor 'w' the element [1] of [4] is missing"));
  CHECK_THAT(
      error_of(piece(f32, {{0}, {2}}), piece(c10::ScalarType::Half, {{2}, {2}})),
      Catch::Contains("'w' has the dtype Float and 1 dimensions in 1.safetensors, but Half and 1 in 2.safetensors"));
  CHECK_THAT(error_of(piece(f32, {{0}, {2}}), piece(f32, {{2, 0}, {1, 1}})), Catch::Contains("but Float and 2 in"));
}

TEST_CASE("checkpoint folder: one without a checkpoint says so") {
  MemoryDisk disk;
  CHECK_THROWS_WITH(SavedFolder(disk, "nowhere"), Catch::Contains("there is no checkpoint nowhere: no such folder"));
  CHECK_THROWS_WITH(SavedFolder(disk, "no/where"), Catch::Contains("there is no checkpoint no/where"));
  disk.make_folder("f");
  CHECK_THROWS_WITH(SavedFolder(disk, "f"), Catch::Contains("the folder f has no checkpoint"));
}

TEST_CASE("checkpoint folder: many files are read with few of them open") {
  MemoryDisk disk;
  std::mt19937 random(3);
  Values values;
  values.add("w", c10::ScalarType::Float, {300, 2}, 150, random).add("v", c10::ScalarType::Char, {300}, 150, random);
  values.save(disk, "f");
  FaultyDisk counted(disk);
  CHECK(values.are_in(counted, "f"));
  CHECK(counted.most_open_files() > 1);
  CHECK(counted.most_open_files() < 100);
}

TEST_CASE("checkpoint steps: the newest complete one is found, and old ones go when it is durable") {
  MemoryDisk disk;
  CHECK_FALSE(newest_step(disk, "runs"));
  for (const int64_t step : {9, 10, 8, 100}) some_values(1).save(disk, step_path("runs", step));
  for (const auto* other : {"step-", "step-x", "step-07", "step--7", "step-7.5", "note"}) {
    some_values(1).save(disk, "runs/kept");
    disk.rename("runs/kept", std::string("runs/") + other);
  }
  CHECK(steps_of(disk, "runs") == std::vector<int64_t>{8, 9, 10, 100});
  // Incomplete ones do not count, and are left alone.
  disk.make_folder("runs/step-200");
  some_values(1).save(disk, "runs/step-300");
  disk.remove_file("runs/step-300/shard-00001-model-00001-of-00001.safetensors");
  CHECK(newest_step(disk, "runs")->path == "runs/step-100");
  // One that was being replaced counts, one that is being removed does not.
  some_values(1).save(disk, "runs/x");
  disk.rename("runs/x", temporary_path("runs/step-50", TemporaryKind::replaced, Owner::next()));
  some_values(1).save(disk, "runs/x");
  disk.rename("runs/x", temporary_path("runs/step-60", TemporaryKind::removing, Owner::next()));
  CHECK(steps_of(disk, "runs") == std::vector<int64_t>{8, 9, 10, 50, 100});
  // Nobody's notes are lost.
  disk.create("runs/step-9/notes.txt");
  CHECK_THROWS_AS(keep_newest_steps(disk, "runs", 0), ValueError);
  CHECK(keep_newest_steps(disk, "runs", 9).empty());
  CHECK(keep_newest_steps(disk, "runs", 2).size() == 2);
  CHECK(steps_of(disk, "runs") == std::vector<int64_t>{9, 50, 100});
  CHECK(keep_newest_steps(disk, "runs", 1).size() == 1);
  CHECK(steps_of(disk, "runs") == std::vector<int64_t>{9, 100});
  CHECK(disk.kind("runs/step-200"));
  CHECK(disk.kind("runs/step-300"));
}

TEST_CASE("checkpoint folder: reads that return less are continued, and those that fail are errors") {
  MemoryDisk disk;
  some_values(1).save(disk, "step");
  FaultyDisk counted(disk);
  REQUIRE(some_values(1).are_in(counted, "step"));
  for (int64_t at = 0; at < static_cast<int64_t>(counted.steps().size()); ++at) {
    CAPTURE(counted.steps()[at], at);
    FaultyDisk slow(disk, at, Fault::short_count);
    CHECK(some_values(1).are_in(slow, "step"));
    FaultyDisk broken(disk, at, Fault::fails);
    CHECK_THROWS_AS(some_values(1).are_in(broken, "step"), DiskError);
  }
}

TEST_CASE("checkpoint steps: a disk that cannot be read is an error, not an older checkpoint") {
  MemoryDisk disk;
  for (const int64_t step : {1, 2}) some_values(1).save(disk, step_path("runs", step));
  FaultyDisk counted(disk);
  CHECK(newest_step(counted, "runs")->step == 2);
  for (int64_t at = 0; at < static_cast<int64_t>(counted.steps().size()); ++at) {
    FaultyDisk faulty(disk, at, Fault::fails);
    CAPTURE(counted.steps()[at]);
    CHECK_THROWS_AS(newest_step(faulty, "runs"), DiskError);
  }
}

TEST_CASE("checkpoint steps: a fault while old ones are removed leaves each of them whole or gone") {
  MemoryDisk saved;
  for (const int64_t step : {1, 2, 3}) some_values(static_cast<uint32_t>(step)).save(saved, step_path("runs", step));
  const auto before = saved.copy();
  FaultyDisk counted(*before);
  keep_newest_steps(counted, "runs", 1);
  for (int64_t at = 0; at < static_cast<int64_t>(counted.steps().size()); ++at) {
    for (const auto fault : {Fault::fails, Fault::fails_when_done, Fault::crashes, Fault::crashes_when_done}) {
      for (int64_t seed = -1; seed < 4; ++seed) {
        const auto disk = saved.copy();
        CAPTURE(counted.steps()[at], at, static_cast<int>(fault), seed);
        FaultyDisk faulty(*disk, at, fault);
        try {
          keep_newest_steps(faulty, "runs", 1);
        } catch (const Error&) {
        } catch (const Crash&) {
        }
        if (seed >= 0) disk->lose_power(static_cast<uint64_t>(seed));
        REQUIRE(newest_step(*disk, "runs")->step == 3);
        for (const auto& name : disk->list("runs")) {
          if (parse_temporary_name(name)) continue;
          const auto step = static_cast<uint32_t>(name.back() - '0');
          REQUIRE(some_values(step).are_in(*disk, "runs/" + name));
        }
      }
    }
  }
}

namespace {

/// Two steps, the newer of which is in its place, but would not survive a loss of power: its process died too early.
std::unique_ptr<MemoryDisk> disk_with_step_in_danger() {
  auto disk = std::make_unique<MemoryDisk>();
  some_values(1).save(*disk, "runs/step-1");
  const auto trial = disk->copy();
  FaultyDisk counted(*trial);
  some_values(2).save(counted, "runs/step-2");
  // The marker got its name before.
  const std::string rename = "rename runs/step-2.saving-";
  FaultyDisk dying(
      *disk, place_of(rename, counted.steps(), place_of(rename, counted.steps()) + 1), Fault::crashes_when_done);
  CHECK_THROWS_AS(some_values(2).save(dying, "runs/step-2"), Crash);
  return disk;
}

} // namespace

TEST_CASE("checkpoint steps: old ones stay until the newest will survive a loss of power") {
  const auto counted_disk = disk_with_step_in_danger();
  FaultyDisk counted(*counted_disk);
  CHECK(keep_newest_steps(counted, "runs", 1).size() == 1);
  // The last round goes through.
  for (int64_t at = 0; at <= static_cast<int64_t>(counted.steps().size()); ++at) {
    for (uint64_t seed = 0; seed < 40; ++seed) {
      const auto disk = disk_with_step_in_danger();
      FaultyDisk faulty(*disk, at, Fault::crashes);
      bool died = false;
      try {
        keep_newest_steps(faulty, "runs", 1);
      } catch (const Crash&) {
        died = true;
      }
      disk->lose_power(seed);
      CAPTURE(at, seed);
      const auto newest = newest_step(*disk, "runs");
      REQUIRE(newest);
      REQUIRE(some_values(static_cast<uint32_t>(newest->step)).are_in(*disk, newest->path));
      if (!died) REQUIRE(newest->step == 2);
    }
  }
}
