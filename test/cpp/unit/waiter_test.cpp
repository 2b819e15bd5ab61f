#include "comm/agree/waiter.h"

#include <atomic>
#include <catch2/catch.hpp>
#include <memory>
#include <stdexcept>
#include <thread>

using shardwise::comm::Waiter;
using namespace std::chrono_literals;

namespace {

/// A work whose wait() knows no timeout, as Gloo's reduce-scatter: it ends when it is let go.
class Held : public c10d::Work {
 public:
  explicit Held(std::shared_ptr<std::atomic<bool>> free, bool fails = false) : free_(std::move(free)), fails_(fails) {}
  bool wait(std::chrono::milliseconds) override {
    while (!*free_) std::this_thread::sleep_for(1ms);
    if (fails_) throw std::runtime_error("it failed");
    return true;
  }

 private:
  std::shared_ptr<std::atomic<bool>> free_;
  bool fails_;
};

} // namespace

TEST_CASE("a waiter tells when a work ended, well or not") {
  const auto free = std::make_shared<std::atomic<bool>>(false);
  Waiter waiter;
  const auto good = waiter.add(c10::make_intrusive<Held>(free));
  const auto bad = waiter.add(c10::make_intrusive<Held>(free, /*fails=*/true));
  CHECK_FALSE(waiter.ended(*good, 0ms));
  CHECK_FALSE(waiter.ended(*good, 20ms));
  *free = true;
  CHECK(waiter.ended(*good, 10s));
  CHECK(waiter.ended(*bad, 10s));
  CHECK(waiter.ended(*good, 0ms));
}

TEST_CASE("a work that never ends holds up nobody but itself") {
  const auto free = std::make_shared<std::atomic<bool>>(false);
  const auto begin = std::chrono::steady_clock::now();
  {
    Waiter waiter;
    const auto stuck = waiter.add(c10::make_intrusive<Held>(free));
    CHECK_FALSE(waiter.ended(*stuck, 10ms));
  }
  CHECK(std::chrono::steady_clock::now() - begin < 5s);
  *free = true;
}
