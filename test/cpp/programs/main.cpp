#define CATCH_CONFIG_RUNNER
#include "programs/options.h"
#include "support/test_device.h"
#include "support/time_limit.h"

#include <ATen/Parallel.h>
#include <catch2/catch.hpp>

#include <cstdlib>
#include <iostream>

namespace shardwise::test {
namespace {

std::optional<uint64_t> seed;

} // namespace

std::optional<uint64_t> chosen_seed() {
  return seed;
}

} // namespace shardwise::test

int main(int argc, char** argv) {
  using namespace shardwise::test;
  Catch::Session session;
  const auto take = [&](uint64_t value) { seed = value; };
  session.cli(session.cli() | Catch::clara::Opt(take, "number")["--seed"]("run the program of this seed alone"));
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
