#include "comm/agree/background.h"

#include <atomic>
#include <catch2/catch.hpp>
#include <chrono>
#include <memory>
#include <stdexcept>
#include <thread>

using shardwise::comm::Background;
using namespace std::chrono_literals;

TEST_CASE("it is known when a task in the background ended, and one that never ends holds up nobody but itself") {
  const auto free = std::make_shared<std::atomic<bool>>(false);
  const auto ends = [](const std::future<void>& task, std::chrono::milliseconds within) {
    return task.wait_for(within) == std::future_status::ready;
  };
  const auto begin = std::chrono::steady_clock::now();
  std::future<void> held;
  {
    Background background;
    CHECK(ends(background.add([] { throw std::runtime_error("it failed"); }), 10s));
    held = background.add([free] {
      while (!*free) std::this_thread::sleep_for(1ms);
    });
    CHECK_FALSE(ends(held, 10ms));
  }
  CHECK(std::chrono::steady_clock::now() - begin < 5s);
  *free = true;
  CHECK(ends(held, 10s));
}
