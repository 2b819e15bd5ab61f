#include "support/processes.h"

#include "support/port.h"
#include "support/time_limit.h"

#include <c10/util/StringUtil.h>
#include <gtest/gtest.h>
#include <unistd.h>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <iostream>
#include <numeric>
#include <optional>
#include <stdexcept>

namespace shardwise::test {
namespace {

constexpr const char* kStorePort = "SHARDWISE_TEST_STORE_PORT";
/// What each process may add to the time limit before the parent's own watch steps in.
constexpr auto kSpare = std::chrono::seconds(60);

c10::intrusive_ptr<c10d::TCPStore> store_at(int port, bool server) {
  c10d::TCPStoreOptions options;
  options.port = static_cast<uint16_t>(port);
  options.isServer = server;
  options.waitWorkers = false;
  return c10::make_intrusive<c10d::TCPStore>("127.0.0.1", options);
}

/// The rank of this process, to the end of the process.
[[noreturn]] void run_this_rank(const std::function<void(Rank&)>& fn) {
  int status = 1;
  {
    const auto number = [](const char* variable) { return std::stoi(std::getenv(variable)); };
    Rank rank(number("RANK"), number("WORLD_SIZE"), store_at(number(kStorePort), false), kMeshTimeout);
    const WatchedThread watched(rank.name());
    const testing::ScopedTrace trace(__FILE__, __LINE__, rank.name());
    try {
      fn(rank);
      status = testing::Test::HasFailure() ? 1 : 0;
    } catch (const std::exception& error) {
      std::cerr << rank.name() << " failed: " << error.what() << std::endl;
    }
  }
  std::exit(status);
}

/// A second call could never run its function: the ranks stop at the first.
void refuse_second_call() {
  static std::pair<const testing::TestInfo*, int64_t> last{nullptr, 0};
  const auto* info = testing::UnitTest::GetInstance()->current_test_info();
  const std::pair now{info, int64_t{info->result()->start_timestamp()}};
  if (now == last) throw std::logic_error("a test calls run_processes once, and this is the second");
  last = now;
}

void show(const std::string& name, const Ended& ended) {
  constexpr size_t kMost = 20000;
  const auto start = ended.output.size() > kMost ? ended.output.size() - kMost : 0;
  ADD_FAILURE() << name << ": " << ended.how() << " after " << ended.after.count() << " ms. Its output:\n"
                << (start > 0 ? "..." : "") << ended.output.substr(start);
}

} // namespace

std::vector<Ended> run_processes(int n, const std::function<void(Rank&)>& fn, const ProcessOptions& options) {
  if (is_rank_process()) run_this_rank(fn);
  refuse_second_call();
  const auto store = store_at(0, true);
  const Port port;
  std::vector<Command> commands;
  for (int k = 0; k < n; ++k) {
    auto environment = of_no_rank(
        {{kStorePort, std::to_string(store->getPort())},
         {"RANK", std::to_string(k)},
         {"WORLD_SIZE", std::to_string(n)},
         {"MASTER_ADDR", "127.0.0.1"},
         {"MASTER_PORT", std::to_string(port.number())}});
    environment.insert(environment.end(), options.environment.begin(), options.environment.end());
    commands.push_back(this_test(environment));
  }
  auto results = run_limited(commands);
  std::vector<int> ranks(results.size());
  std::iota(ranks.begin(), ranks.end(), 0);
  // The first that failed is told first.
  std::stable_sort(ranks.begin(), ranks.end(), [&](int a, int b) { return results[a].after < results[b].after; });
  for (const int rank : ranks) {
    const bool failed = results[rank].timed_out || (!results[rank].ok() && !options.may_fail.contains(rank));
    if (failed) show(c10::str("rank ", rank, " of ", n), results[rank]);
  }
  return results;
}

Command this_test(const Environment& environment) {
  const auto* info = testing::UnitTest::GetInstance()->current_test_info();
  Command command{
      {std::filesystem::read_symlink("/proc/self/exe"), "--gtest_also_run_disabled_tests",
       c10::str("--gtest_filter=", info->test_suite_name(), ".", info->name())},
      {}};
  // These would make it run other tests, or write over the results of this process, whose seconds include its own.
  for (const char* name :
       {"GTEST_OUTPUT", "GTEST_FILTER", "GTEST_REPEAT", "GTEST_SHUFFLE", "GTEST_SHARD_INDEX", "GTEST_TOTAL_SHARDS",
        "GTEST_SHARD_STATUS_FILE", "XML_OUTPUT_FILE"}) {
    command.environment.emplace_back(name, std::nullopt);
  }
  command.environment.insert(command.environment.end(), environment.begin(), environment.end());
  return command;
}

std::vector<Ended> run_limited(const std::vector<Command>& commands) {
  const auto limit = default_time_limit();
  const TimeLimit backstop(limit + kSpare);
  return run_commands(commands, limit);
}

std::filesystem::path python() {
  return SHARDWISE_TEST_PYTHON;
}

bool is_rank_process() {
  return std::getenv(kStorePort) != nullptr;
}

} // namespace shardwise::test
