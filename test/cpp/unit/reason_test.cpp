// What an error says of the error that caused it.
#include "base/reason.h"

#include <catch2/catch.hpp>

#include <stdexcept>

using shardwise::base::reason;

TEST_CASE("an error that another one quotes has neither its beginning nor details of its own") {
  CHECK(reason(std::runtime_error("shardwise: a sum failed. Details: rank 1 died.")) == "a sum failed. rank 1 died.");
  CHECK(
      reason(std::runtime_error("shardwise: a sum failed. The reason: rank 1 died.")) == "a sum failed: rank 1 died.");
  CHECK(reason(std::runtime_error("Connection closed")) == "Connection closed");
}
