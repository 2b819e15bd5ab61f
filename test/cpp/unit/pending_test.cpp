#include "comm/collectives/collectives.h"

#include <shardwise/error.h>
#include <catch2/catch.hpp>

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

TEST_CASE("a collective that succeeds says nothing") {
  CHECK_NOTHROW(pending(End::good).wait());
}

// T20: an aborted operation raises nothing of its own.
TEST_CASE("a collective that was aborted is an error") {
  CHECK_THROWS_AS(pending(End::aborted).wait(), shardwise::PeerError);
  CHECK_THROWS_WITH(
      pending(End::aborted).wait(),
      Catch::StartsWith("shardwise: rank 2: the average of 'blocks.3' failed.") && Catch::EndsWith("it was aborted"));
}

TEST_CASE("the error of a collective names it, the rank, what to look for and the reason") {
  CHECK_THROWS_AS(pending(End::failed).wait(), shardwise::PeerError);
  CHECK_THROWS_WITH(
      pending(End::failed).wait(), Catch::StartsWith("shardwise: rank 2: the average of 'blocks.3' failed.") &&
                                       Catch::Contains("Look for the error of another rank first") &&
                                       Catch::Contains("slower than the timeout") &&
                                       Catch::EndsWith("Connection closed by peer [10.0.0.7]:4711"));
}

TEST_CASE("the error of a collective of ours guesses nothing, for it knows what happened") {
  CHECK_THROWS_WITH(
      pending(End::known).wait(), Catch::Equals("shardwise: rank 2: the average of 'blocks.3' failed. The reason: rank "
                                                "1 of 4: a sum failed, because rank 3 died"));
}
