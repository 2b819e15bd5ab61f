#include "comm/collectives/collectives.h"

#include <shardwise/error.h>
#include <catch2/catch.hpp>

#include <tuple>
#include <vector>

using shardwise::comm::Pending;

namespace {

enum class End { good, aborted, failed, known };

/// A collective that has ended in a certain way.
class Ended : public c10d::Work {
 public:
  explicit Ended(End end) : end_(end) {}
  bool wait(std::chrono::milliseconds) override {
    if (end_ == End::failed) throw std::runtime_error("Connection closed by peer [10.0.0.7]:4711");
    if (end_ == End::known) throw std::runtime_error("shardwise: rank 1 of 4: a sum failed, because rank 3 died");
    return end_ == End::good;
  }

 private:
  End end_;
};

Pending pending(End end) {
  return {c10::make_intrusive<Ended>(end), "the average of 'blocks.3'", 2};
}

} // namespace

TEST_CASE("the error of a collective names it, the rank, what to look for and the reason, where it knows that") {
  CHECK_NOTHROW(pending(End::good).wait());
  const std::string failed = "shardwise: rank 2: the average of 'blocks.3' failed.";
  const std::string advice = "Look for the error of another rank first";
  const std::vector<std::tuple<End, std::string, std::string>> ways{
      // T20: an aborted operation raises nothing of its own.
      {End::aborted, failed, "it was aborted"},
      {End::failed, advice, "Connection closed by peer [10.0.0.7]:4711"},
      // Ours knows what happened: nothing is guessed.
      {End::known, failed + " The reason: rank 1", " of 4: a sum failed, because rank 3 died"}};
  for (const auto& [end, part, last] : ways) {
    CHECK_THROWS_AS(pending(end).wait(), shardwise::PeerError);
    CHECK_THROWS_WITH(pending(end).wait(), Catch::StartsWith(failed) && Catch::Contains(part) && Catch::EndsWith(last));
  }
}
