#include "support/ranks.h"

#include "support/test_device.h"
#include "support/time_limit.h"

#include <shardwise/error.h>

#include <ATen/Parallel.h>
#include <c10/util/StringUtil.h>
#include <gtest/gtest.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <algorithm>
#include <mutex>
#include <stdexcept>
#include <thread>

namespace shardwise::test {
namespace {

struct Failure {
  int rank;
  std::string text;
  /// It says no more than that another rank is gone or late.
  bool consequence;
};

bool blames_peer(const std::exception& error) {
  if (dynamic_cast<const PeerError*>(&error) != nullptr) return true;
  const std::string text = error.what();
  const auto says = [&](const char* words) { return text.find(words) != std::string::npos; };
  return says("closed by peer") || says("reset by peer") || says("Broken pipe") || says("Timed out waiting") ||
         says("caused pair closure");
}

/// Runs one rank to its end; gives its failure, if any.
std::optional<Failure> run_one(Rank& rank, const std::function<void(Rank&)>& fn) {
  // What main() set for its own thread: OpenMP knows nothing of it here, and its idle workers would spin.
  at::init_num_threads();
  const WatchedThread watched(rank.name());
  const testing::ScopedTrace trace(__FILE__, __LINE__, rank.name());
  const OnDeviceOfRank scope(rank.rank());
  try {
    const testing::internal::HasNewFatalFailureHelper assertions;
    fn(rank);
    if (!assertions.has_new_fatal_failure()) return std::nullopt;
    return Failure{rank.rank(), "an assertion failed: see above", false};
  } catch (const std::exception& error) {
    return Failure{rank.rank(), error.what(), blames_peer(error)};
  } catch (...) {
    return Failure{rank.rank(), "it threw something that is no std::exception", false};
  }
}

} // namespace

void run_ranks(int n, const std::function<void(Rank&)>& fn, std::chrono::milliseconds timeout) {
  const TimeLimit limit;
  const auto store = c10::make_intrusive<c10d::HashStore>();
  std::vector<Rank> ranks;
  for (int k = 0; k < n; ++k) ranks.emplace_back(k, n, store, timeout);

  std::mutex mutex;
  std::vector<Failure> failures;
  std::vector<std::thread> threads;
  for (auto& rank : ranks) {
    threads.emplace_back([&] {
      auto failure = run_one(rank, fn);
      if (!failure) return;
      {
        const std::lock_guard lock(mutex);
        failures.push_back(*std::move(failure));
      }
      rank.close();
    });
  }
  for (auto& thread : threads) thread.join();
  if (failures.empty()) return;

  std::stable_partition(failures.begin(), failures.end(), [](const Failure& failure) { return !failure.consequence; });
  std::string text;
  for (const auto& failure : failures) {
    text += c10::str(text.empty() ? "" : "\n  then ", ranks[failure.rank].name(), ": ", failure.text);
  }
  throw std::runtime_error(text);
}

} // namespace shardwise::test
