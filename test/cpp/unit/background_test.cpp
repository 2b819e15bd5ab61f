#include "comm/agree/background.h"

#include <atomic>
#include <catch2/catch.hpp>
#include <chrono>
#include <memory>
#include <stdexcept>
#include <thread>

using shardwise::comm::Background;
using namespace std::chrono_literals;

namespace {

/// A task that ends when it is let go.
std::function<void()> held(const std::shared_ptr<std::atomic<bool>>& free, bool fails = false) {
  return [free, fails] {
    while (!*free) std::this_thread::sleep_for(1ms);
    if (fails) throw std::runtime_error("it failed");
  };
}

bool ends(const std::future<void>& task, std::chrono::milliseconds within) {
  return task.wait_for(within) == std::future_status::ready;
}

} // namespace

TEST_CASE("it is known when a task in the background ended, well or not") {
  const auto free = std::make_shared<std::atomic<bool>>(false);
  Background background;
  const auto good = background.add(held(free));
  const auto bad = background.add(held(free, /*fails=*/true));
  CHECK_FALSE(ends(good, 0ms));
  CHECK_FALSE(ends(good, 20ms));
  *free = true;
  CHECK(ends(good, 10s));
  CHECK(ends(bad, 10s));
  CHECK(ends(good, 0ms));
}

TEST_CASE("a task that never ends holds up nobody but itself") {
  const auto free = std::make_shared<std::atomic<bool>>(false);
  const auto begin = std::chrono::steady_clock::now();
  {
    Background background;
    CHECK_FALSE(ends(background.add(held(free)), 10ms));
  }
  CHECK(std::chrono::steady_clock::now() - begin < 5s);
  *free = true;
}
