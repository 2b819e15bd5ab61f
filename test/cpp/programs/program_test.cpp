// Random programs of fully_shard() and replicate(), compared with plain LibTorch after each instruction.
#define CATCH_CONFIG_RUNNER
#include "late_device/faults.h"
#include "programs/machine.h"
#include "support/ranks.h"
#include "support/test_device.h"
#include "support/time_limit.h"

#include <ATen/Parallel.h>
#include <catch2/catch.hpp>

#include <cstdlib>
#include <iostream>

namespace shardwise::test {
namespace {

void run_program(uint64_t seed, bool plain = false) {
  const Program program(seed, plain);
  try {
    // Soon enough that an error names the unit, and not the time limit the program.
    run_ranks(
        Program::kRanks, [&](Rank& rank) { Machine(rank, program).run(); }, std::chrono::seconds(10));
  } catch (const std::exception& error) {
    FAIL(program.text() << "\n" << error.what() << "\n\nOnce more: program_tests --rng-seed " << seed);
  }
  for (const auto& fault : late::take_faults()) FAIL_CHECK("program " << seed << ": " << fault);
}

/// These, or the one that --rng-seed names.
void run_programs(uint64_t first, int count) {
  if (const auto seed = Catch::rngSeed(); seed != 0) {
    std::cout << Program(seed).text() << std::endl;
    return run_program(seed);
  }
  for (int i = 0; i < count; ++i) run_program(first + static_cast<uint64_t>(i));
  SUCCEED();
}

} // namespace

TEST_CASE("programs.random programs train as plain LibTorch does") {
  run_programs(1000, 12);
}

// 1011, 1014: in the layout flat, a gradient was another piece than its shard once others were frozen. 1018: sums of
// replicated units and gathers of sharded ones shared a process group, in an order that depended on the rank. 1089: a
// shard was replaced while an operation had a view of another full parameter of the unit. 1116: one was replaced that
// some ranks have no elements of.
TEST_CASE("programs.programs that found errors") {
  if (Catch::rngSeed() != 0) return;
  for (const uint64_t seed : {1011, 1014, 1018}) run_program(seed, /*plain=*/true);
  for (const uint64_t seed : {1089, 1116}) run_program(seed);
  SUCCEED();
}

// Run it by name: program_tests "[.long]".
TEST_CASE("programs.many random programs", "[.long]") {
  run_programs(1012, 300);
}

} // namespace shardwise::test

int main(int argc, char** argv) {
  using namespace shardwise::test;
  Catch::Session session;
  if (const int status = session.applyCommandLine(argc, argv); status != 0) return status;
  // As the tests with ranks do.
  at::set_num_threads(1);
  setenv("TORCH_FR_BUFFER_SIZE", "0", /*overwrite=*/0);
  if (const auto problem = problem_of_test_device(); !problem.empty()) {
    std::cerr << problem << "\n";
    return 1;
  }
  set_up_test_device();
  start_time_watch();
  const WatchedThread watched("the main thread");
  return session.run();
}
