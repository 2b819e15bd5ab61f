#include "files/merge.h"
#include "files/place.h"
#include "support/folder.h"
#include "unit/files/values.h"

#include <catch2/catch.hpp>

#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <filesystem>

using namespace shardwise::files;
using namespace shardwise::test;

namespace {

/// Runs this in a process of its own; what it ends with.
template <typename Do>
int status_of_child(const Do& what) {
  const auto child = fork();
  if (child == 0) _exit(what());
  int status = 0;
  waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

} // namespace

TEST_CASE("checkpoint disk: saves replace each other on a real one, and leave nothing beside") {
  const TemporaryFolder folder;
  auto& disk = Disk::real();
  for (const uint32_t seed : {1U, 2U, 3U}) {
    some_values(seed).save(disk, folder / "runs/step");
    CHECK(some_values(seed).are_in(disk, folder / "runs/step"));
    CHECK(disk.list(folder / "runs") == std::vector<std::string>{"step"});
  }
}

TEST_CASE("checkpoint disk: a link is read through, and never replaced") {
  const TemporaryFolder folder;
  auto& disk = Disk::real();
  some_values(1).save(disk, folder / "runs/step-1/");
  std::filesystem::create_symlink("runs/step-1", folder / "latest");
  CHECK(some_values(1).are_in(disk, folder / "latest"));
  CHECK_THROWS_WITH(some_values(2).save(disk, folder / "latest"), Catch::Contains("latest, which is a link"));
  // One that leads nowhere too, before anything is written.
  std::filesystem::create_symlink("nowhere", folder / "dangling");
  CHECK_THROWS_WITH(begin_saving(disk, folder / "dangling"), Catch::Contains("dangling, which is a link"));
  CHECK_THROWS_WITH(begin_saving(disk, folder / "dangling/step"), Catch::Contains("dangling failed: File exists"));
  CHECK_THROWS_WITH(
      merge_checkpoint(disk, folder / "latest", folder / "dangling", {}, 1),
      Catch::Contains("dangling exists already"));
  CHECK_THROWS_WITH(write_whole_file(disk, folder / "dangling", {}), Catch::Contains("dangling', which is a link"));
  CHECK(leftovers(disk, folder.path()).empty());
  // As Hugging Face's libraries keep files.
  std::filesystem::create_directory(folder / "snapshot");
  for (const auto& name : disk.list(folder / "runs/step-1"))
    std::filesystem::create_symlink("../runs/step-1/" + name, folder / ("snapshot/" + name));
  CHECK(some_values(1).are_in(disk, folder / "snapshot"));
  CHECK(some_values(1).are_in(disk, folder / "runs/step-1"));
}

TEST_CASE("checkpoint disk: a process that is killed leaves a leftover that the next save removes") {
  const TemporaryFolder folder;
  auto& disk = Disk::real();
  some_values(1).save(disk, folder / "step");
  const auto status = status_of_child([&] {
    const auto saving = begin_saving(disk, folder / "step");
    write_shard(disk, saving.folder, 1, some_values(2).shard(0));
    return leftovers(disk, folder.path()).at(0).is_dead ? 1 : 0;
  });
  CHECK(status == 0);
  const auto left = leftovers(disk, folder.path());
  REQUIRE(left.size() == 1);
  CHECK(left[0].is_dead);
  some_values(2).save(disk, folder / "next");
  CHECK(disk.list(folder.path()) == std::vector<std::string>{"next", "step"});
  CHECK(some_values(1).are_in(disk, folder / "step"));
  // So does a merge, of one that died with an index too.
  const auto again = status_of_child([&] {
    disk.make_folder(temporary_path(folder / "merged", TemporaryKind::saving, Owner::next()));
    disk.create(leftovers(disk, folder.path()).at(0).path + "/model.safetensors.index.json");
    return 0;
  });
  CHECK(again == 0);
  merge_checkpoint(disk, folder / "step", folder / "merged", {}, 1);
  CHECK(disk.list(folder.path()) == std::vector<std::string>{"merged", "next", "step"});
}

TEST_CASE("checkpoint disk: a folder that may not be written to is told") {
  const TemporaryFolder folder;
  auto& disk = Disk::real();
  some_values(1).save(disk, folder / "step");
  chmod(folder.path().c_str(), 0555);
  const auto status = status_of_child([&] {
    // Permissions say nothing to the superuser.
    if (geteuid() == 0 && setuid(65534) != 0) return 2;
    try {
      some_values(2).save(disk, folder / "step");
    } catch (const DiskError& error) {
      const std::string text = error.what();
      const bool is_told = text.find("making the folder " + (folder / "step.saving-")) != std::string::npos &&
                           text.find("Save to a folder that this process may write to") != std::string::npos;
      return error.number() == EACCES && is_told ? 0 : 3;
    }
    return 4;
  });
  chmod(folder.path().c_str(), 0755);
  CHECK(status == 0);
  CHECK(some_values(1).are_in(disk, folder / "step"));
}

TEST_CASE("checkpoint disk: where there is no room the last checkpoint stays, and what was written goes") {
  const TemporaryFolder folder;
  auto& disk = Disk::real();
  some_values(1).save(disk, folder / "step");
  const auto status = status_of_child([&] {
    // A write that goes beyond is done in part; the next one fails.
    std::signal(SIGXFSZ, SIG_IGN);
    const rlimit limit{.rlim_cur = 100'000, .rlim_max = 100'000};
    if (setrlimit(RLIMIT_FSIZE, &limit) != 0) return 2;
    std::mt19937 random(1);
    Values values;
    values.add("w", c10::ScalarType::Float, {50'000}, 1, random);
    try {
      values.save(disk, folder / "step");
    } catch (const DiskError& error) {
      const std::string text = error.what();
      const bool is_told = text.find("writing to " + (folder / "step.saving-")) != std::string::npos &&
                           text.find("Files may not be so large there") != std::string::npos;
      return error.number() == EFBIG && is_told ? 0 : 3;
    }
    return 4;
  });
  CHECK(status == 0);
  CHECK(disk.list(folder.path()) == std::vector<std::string>{"step"});
  CHECK(some_values(1).are_in(disk, folder / "step"));
}

TEST_CASE("checkpoint disk: a marker or an index of absurd size is refused, not read") {
  const TemporaryFolder folder;
  auto& disk = Disk::real();
  const std::string name = GENERATE("shardwise.json", "model.safetensors.index.json");
  disk.create(folder / name);
  // More than there is of memory; it takes no room on the disk.
  std::filesystem::resize_file(folder / name, uint64_t{1} << 43);
  CHECK_THROWS_WITH(
      SavedFolder(disk, folder.path()),
      Catch::Contains(folder / name + " has 8796093022208 bytes") && Catch::Contains("Check the path"));
}

TEST_CASE("checkpoint disk: errors say what was done to which file, and why") {
  const TemporaryFolder folder;
  auto& disk = Disk::real();
  const auto file = folder / "file";
  disk.create(file);
  CHECK_THROWS_WITH(disk.create(file), Catch::Contains("opening " + file + " failed: File exists"));
  CHECK_THROWS_WITH(
      disk.open(folder / "none"), Catch::Contains("No such file or directory") && Catch::Contains("Check the path"));
  CHECK_THROWS_WITH(disk.open(folder.path())->size(), Catch::Contains("which is not a regular file"));
  CHECK_THROWS_AS(disk.list(file), DiskError);
  CHECK_THROWS_AS(disk.remove_file(folder / "none"), DiskError);
  CHECK_THROWS_AS(disk.remove_folder(folder / "none"), DiskError);
  CHECK_THROWS_AS(disk.rename(folder / "none", file), DiskError);
  CHECK_THROWS_AS(disk.exchange(folder / "none", file), DiskError);
  CHECK_THROWS_AS(disk.sync_folder(folder / "none"), DiskError);
  CHECK(disk.kind(file) == Disk::Kind::file);
  CHECK(disk.kind(folder.path()) == Disk::Kind::folder);
  CHECK_FALSE(disk.kind(folder / "none"));
  CHECK_FALSE(disk.kind(file + "/none"));
  REQUIRE(mkfifo((folder / "pipe").c_str(), 0600) == 0);
  CHECK(disk.kind(folder / "pipe") == Disk::Kind::other);
  CHECK_THROWS_WITH(disk.open(folder / "pipe")->size(), Catch::Contains("which is not a regular file"));
  CHECK(folder_of("a/b/") == "a");
  CHECK(folder_of("a//b") == "a");
  CHECK(folder_of("b") == ".");
  CHECK(folder_of("/b") == "/");
  CHECK(name_of("a/b/") == "b");
}
