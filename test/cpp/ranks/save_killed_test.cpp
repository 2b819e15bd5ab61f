// Ranks that are killed while they save, at any time: what a save has returned for is there, and what is there is
// whole.
#include "files/place.h"
#include "files/saved_folder.h"
#include "files/steps.h"
#include "ranks/saved_models.h"
#include "support/folder.h"
#include "support/port.h"
#include "support/processes.h"

#include <csignal>
#include <random>
#include <thread>

namespace shardwise::test {
namespace {

constexpr const char* kRoot = "SHARDWISE_TEST_SAVES";
/// Microseconds after which a rank kills itself; unset for one that does not.
constexpr const char* kKilledAfter = "SHARDWISE_TEST_KILLED_AFTER";
/// From when they count: set for the beginning, unset for the first save that all ranks know to be there.
constexpr const char* kFromTheBeginning = "SHARDWISE_TEST_KILLED_FROM_THE_BEGINNING";
constexpr int kRanks = 3;

/// Every element of the model has the number of the step.
void set_all(Stack& model, int64_t step) {
  const torch::NoGradGuard no_grad;
  for (auto& parameter : model->parameters()) parameter.fill_(static_cast<double>(step));
}

/// The end of this rank, if it is to be killed.
void count_down() {
  const char* after = std::getenv(kKilledAfter);
  if (after == nullptr) return;
  std::thread([time = std::chrono::microseconds(std::stoll(after))] {
    std::this_thread::sleep_for(time);
    kill(getpid(), SIGKILL);
  }).detach();
}

/// Saves without end. Tells each step that it has saved.
void save_without_end(const std::string& root, bool in_background) {
  const auto mesh = Mesh::from_env(MeshOptions().device(at::kCPU).timeout(std::chrono::seconds(60)));
  Stack model;
  shard_stack(model, FullyShardOptions().mesh(mesh));
  bool is_counting = std::getenv(kFromTheBeginning) != nullptr;
  if (is_counting) count_down();
  AsyncSaver saver;
  const auto newest = newest_step(root);
  const auto first = newest ? newest->step + 1 : 1;
  for (int64_t step = first;; ++step) {
    set_all(model, step);
    const auto folder = step_folder(root, step);
    const auto options = SaveOptions().values({{"step", step}});
    in_background ? saver.save(folder, model, options) : save(folder, model, options);
    // A save in the background is there when the next one has begun.
    const auto done = in_background ? step - 1 : step;
    if (mesh.rank() == 0) {
      std::printf("saved %ld\n", static_cast<long>(done));
      std::fflush(stdout);
      if (done > 2) keep_newest_steps(root, 2);
    }
    if (is_counting || done < first) continue;
    mesh.barrier();
    count_down();
    is_counting = true;
  }
}

/// The last step that the output says was saved; 0 if it says none.
int64_t last_saved(const std::string& output) {
  const auto at = output.rfind("saved ");
  return at == std::string::npos ? 0 : std::stoll(output.substr(at + 6));
}

void check_steps(const std::string& root, int64_t saved) {
  const auto steps = files::complete_steps(files::Disk::real(), root);
  EXPECT_GE(steps.empty() ? 0 : steps.back().step, saved);
  for (const auto& [step, path] : steps) {
    EXPECT_EQ(files::verify_checkpoint(files::Disk::real(), path), std::vector<std::string>{});
    Stack model;
    const auto loaded = load(path, model);
    EXPECT_EQ(std::get<int64_t>(loaded.values.at("step")), step);
    for (const auto& parameter : model->parameters()) {
      EXPECT_TRUE(parameter.eq(static_cast<double>(step)).all().item<bool>()) << path;
    }
  }
}

void kill_at_random_times(bool in_background, int rounds) {
  if (const char* root = std::getenv(kRoot)) {
    save_without_end(root, in_background);
    return;
  }
  const TemporaryFolder folder;
  const auto root = folder / "run";
  std::mt19937 random(in_background ? 1 : 2); // NOLINT(cert-msc51-cpp): the same times in each run
  int64_t saved = 0;
  for (int round = 0; round < rounds; ++round) {
    SCOPED_TRACE(c10::str("round ", round));
    const auto victim = static_cast<int>(random() % kRanks);
    const auto after = random() % 200'000;
    const Port port;
    std::vector<Command> commands;
    for (int rank = 0; rank < kRanks; ++rank) {
      Environment environment{
          {kRoot, root},
          {"RANK", std::to_string(rank)},
          {"WORLD_SIZE", std::to_string(kRanks)},
          {"MASTER_ADDR", "127.0.0.1"},
          {"MASTER_PORT", std::to_string(port.number())}};
      if (rank == victim) environment.emplace_back(kKilledAfter, std::to_string(after));
      if (round % 2 == 1) environment.emplace_back(kFromTheBeginning, "1");
      commands.push_back(this_test(environment));
    }
    const auto ended = run_commands(commands, std::chrono::seconds(120));
    for (const auto& each : ended) EXPECT_FALSE(each.timed_out) << each.output;
    EXPECT_EQ(ended[static_cast<size_t>(victim)].signal, SIGKILL) << ended[static_cast<size_t>(victim)].output;
    saved = std::max(saved, last_saved(ended.front().output));
    check_steps(root, saved);
  }
  EXPECT_GT(saved, 0);
  // The next save removes what they left.
  save(step_folder(root, saved + 10), Stack());
  EXPECT_TRUE(files::leftovers(files::Disk::real(), root).empty());
}

} // namespace

TEST(SaveKilled, AtAnyTime) {
  kill_at_random_times(false, by_form(4, 100));
}

TEST(SaveKilled, WhileItIsWrittenInTheBackground) {
  kill_at_random_times(true, by_form(4, 100));
}

} // namespace shardwise::test
