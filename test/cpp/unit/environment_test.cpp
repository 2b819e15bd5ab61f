#include "comm/rendezvous/environment.h"
#include "support/variables.h"

#include <shardwise/error.h>
#include <catch2/catch.hpp>

#include <limits>

using shardwise::comm::Environment;
using shardwise::test::Variables;
using Changes = shardwise::test::Environment;

namespace {

/// Nothing set but these.
Environment read(const Changes& changes) {
  const Variables changed(shardwise::test::of_no_rank(changes));
  return Environment::read();
}

Changes second_of_four(const Changes& more = {}) {
  Changes result{{"RANK", "1"}, {"WORLD_SIZE", "4"}, {"MASTER_ADDR", "node-7"}, {"MASTER_PORT", "29501"}};
  result.insert(result.end(), more.begin(), more.end());
  return result;
}

} // namespace

TEST_CASE("environment: nothing set is a world of one") {
  for (const auto& changes : {Changes{}, Changes{{"LOCAL_RANK", "3"}}}) {
    const auto env = read(changes);
    CHECK(env.rank == 0);
    CHECK(env.world_size == 1);
    CHECK_FALSE(env.local_rank);
    CHECK(env.master_address.empty());
    CHECK_FALSE(env.agent_store);
    CHECK(env.connect(std::chrono::seconds(1))->add("key", 2) == 2);
  }
}

TEST_CASE("environment: which device a rank takes") {
  using shardwise::comm::choose_device;
  // Of several, the one of its number on the host; the only one, whatever its number.
  CHECK(choose_device("cuda", 8, 16, 3) == 3);
  CHECK(choose_device("cuda", 8, 1, 3) == 3);
  CHECK(choose_device("cuda", 1, 16, 3) == 0);
  CHECK(choose_device("cuda", 1, 16, std::nullopt) == 0);
  CHECK(choose_device("cuda", 8, 1, std::nullopt) == 0);
  CHECK_THROWS_WITH(
      choose_device("cuda", 2, 4, 2), Catch::Contains("LOCAL_RANK is 2") && Catch::Contains("sees 2 cuda devices") &&
                                          Catch::Contains("MeshOptions().device()"));
  CHECK_THROWS_WITH(
      choose_device("cuda", 8, 16, std::nullopt),
      Catch::Contains("nothing says which of them belongs to this rank") && Catch::Contains("Set LOCAL_RANK"));
  CHECK_THROWS_AS(choose_device("cuda", 8, 16, std::nullopt), shardwise::ValueError);
}

TEST_CASE("environment: the transport") {
  const auto transport = [](const std::optional<std::string>& name) {
    const Variables changed({{"SHARDWISE_TRANSPORT", name}});
    return shardwise::comm::transport_in_environment();
  };
  CHECK_FALSE(transport(std::nullopt));
  CHECK_FALSE(transport(""));
  CHECK(transport("direct") == shardwise::Transport::direct);
  CHECK(transport("gloo") == shardwise::Transport::gloo);
  CHECK_THROWS_WITH(transport("tcp"), Catch::Contains("SHARDWISE_TRANSPORT is 'tcp'") && Catch::Contains("'gloo'"));
  CHECK_THROWS_AS(transport("tcp"), shardwise::ValueError);
}

TEST_CASE("environment: torchrun's variables") {
  const auto env = read(second_of_four(
      {{"LOCAL_RANK", "1"}, {"TORCHELASTIC_USE_AGENT_STORE", "True"}, {"TORCHELASTIC_RESTART_COUNT", "2"}}));
  CHECK(env.local_rank == 1);
  CHECK(env.rank == 1);
  CHECK(env.world_size == 4);
  CHECK(env.master_address == "node-7");
  CHECK(env.master_port == 29501);
  CHECK(env.agent_store);
  CHECK_FALSE(read(second_of_four({{"TORCHELASTIC_USE_AGENT_STORE", "False"}})).agent_store);
}

TEST_CASE("environment: the limits of every number") {
  const auto largest = std::numeric_limits<int>::max();
  CHECK(read(second_of_four({{"MASTER_PORT", "1"}})).master_port == 1);
  CHECK(read(second_of_four({{"MASTER_PORT", "65535"}})).master_port == 65535);
  CHECK(read(second_of_four({{"WORLD_SIZE", std::to_string(largest)}})).world_size == largest);
  CHECK(read(second_of_four({{"RANK", "0"}})).rank == 0);
  CHECK(read(second_of_four({{"RANK", "3"}})).rank == 3);
}

TEST_CASE("environment: what is wrong is named") {
  struct Case {
    const char* name;
    std::optional<std::string> value;
    const char* text;
  };
  const std::vector<Case> cases{
      {"RANK", std::nullopt, "the environment variable RANK is not set, but others of"},
      {"WORLD_SIZE", std::nullopt, "the environment variable WORLD_SIZE is not set, but others of"},
      {"MASTER_ADDR", std::nullopt, "the environment variable MASTER_ADDR is not set, but others of"},
      {"MASTER_PORT", std::nullopt, "the environment variable MASTER_PORT is not set, but others of"},
      {"RANK", "", "RANK is ''; it must be a whole number from 0 to 2147483647."},
      {"RANK", "one", "RANK is 'one'; it must be"},
      {"RANK", "-1", "RANK is '-1'; it must be"},
      {"RANK", "4", "RANK is 4, but WORLD_SIZE is 4; RANK counts from 0 to WORLD_SIZE - 1."},
      {"WORLD_SIZE", "0", "WORLD_SIZE is '0'; it must be a whole number from 1 to 2147483647."},
      {"WORLD_SIZE", "4 ", "WORLD_SIZE is '4 '; it must be"},
      {"WORLD_SIZE", "2147483648", "WORLD_SIZE is '2147483648'; it must be"},
      {"MASTER_ADDR", "", "MASTER_ADDR is empty; it must be"},
      {"MASTER_PORT", "0", "MASTER_PORT is '0'; it must be a whole number from 1 to 65535."},
      {"MASTER_PORT", "65536", "MASTER_PORT is '65536'; it must be"},
      {"LOCAL_RANK", "x", "LOCAL_RANK is 'x'; it must be"},
  };
  for (const auto& [name, value, text] : cases) {
    CAPTURE(name, text);
    const auto changes = second_of_four({{name, value}});
    CHECK_THROWS_AS(read(changes), shardwise::ValueError);
    CHECK_THROWS_WITH(read(changes), Catch::StartsWith("shardwise: ") && Catch::Contains(text));
  }
}

TEST_CASE("environment: one variable alone is a mistake, not a world of one") {
  for (const char* name : {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}) {
    for (const char* value : {"1", ""}) {
      CAPTURE(name, value);
      CHECK_THROWS_AS(read({{name, value}}), shardwise::ValueError);
    }
  }
}
