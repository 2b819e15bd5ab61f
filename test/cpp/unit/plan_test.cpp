#include "unit/json.h"

#include <shardwise/plan.h>
#include <catch2/catch.hpp>
#include <iterator>

#include <sstream>

using shardwise::Plan;
using shardwise::test::Json;

namespace {

Plan example() {
  Plan plan;
  plan.mesh = "Mesh(world=4; rank 1 on cpu)";
  plan.units.push_back({"blocks.0", "replicate", {{"float", "cpu", 12, 1'500'000, 6'000'000, 6'000'128}}});
  plan.units.push_back(
      {"", "replicate", {{"float", "cpu", 2, 1'000, 4'000, 4'096}, {"bfloat16", "cuda:1", 1, 10, 20, 64}}});
  return plan;
}

std::vector<std::string> lines_of(const std::string& text) {
  std::vector<std::string> result;
  std::istringstream stream(text);
  for (std::string line; std::getline(stream, line);) result.push_back(line);
  return result;
}

std::vector<std::string> words_of(const std::string& line) {
  std::vector<std::string> result;
  std::istringstream stream(line);
  for (std::string word; stream >> word;) result.push_back(word);
  return result;
}

} // namespace

TEST_CASE("plan: the table has a line for every group, and their sum") {
  const auto lines = lines_of(example().table());
  REQUIRE(lines.size() == 6);
  CHECK(lines[0] == "Mesh(world=4; rank 1 on cpu)");
  CHECK(
      words_of(lines[2]) ==
      std::vector<std::string>{"blocks.0", "replicate", "float", "12", "1500000", "6.00", "6.00"});
  CHECK(words_of(lines[3]) == std::vector<std::string>{"(root)", "replicate", "float", "2", "1000", "0.00", "0.00"});
  CHECK(words_of(lines[4]) == std::vector<std::string>{"(root)", "replicate", "bfloat16", "1", "10", "0.00", "0.00"});
  CHECK(words_of(lines[5]) == std::vector<std::string>{"sum", "15", "1501010", "6.00", "6.00"});
  for (size_t i = 2; i < lines.size(); ++i) CHECK(lines[i].size() == lines[1].size());
}

TEST_CASE("plan: the table of nothing") {
  const auto lines = lines_of(Plan{.mesh = "Mesh(world=1; rank 0 on cpu)", .units = {}}.table());
  REQUIRE(lines.size() == 3);
  CHECK(words_of(lines[2]) == std::vector<std::string>{"sum", "0", "0", "0.00", "0.00"});
}

TEST_CASE("plan: JSON has everything") {
  const auto plan = example();
  const auto json = Json::parse(plan.json());
  CHECK(json.object.at("mesh").text == plan.mesh);
  const auto& units = json.object.at("units").list;
  REQUIRE(units.size() == plan.units.size());
  for (size_t i = 0; i < units.size(); ++i) {
    CHECK(units[i].object.at("name").text == plan.units[i].name);
    CHECK(units[i].object.at("kind").text == plan.units[i].kind);
    const auto& groups = units[i].object.at("groups").list;
    REQUIRE(groups.size() == plan.units[i].groups.size());
    for (size_t k = 0; k < groups.size(); ++k) {
      const auto& group = plan.units[i].groups[k];
      CHECK(groups[k].object.at("dtype").text == group.dtype);
      CHECK(groups[k].object.at("device").text == group.device);
      CHECK(groups[k].object.at("parameters").number == group.parameters);
      CHECK(groups[k].object.at("elements").number == group.elements);
      CHECK(groups[k].object.at("bytes").number == group.bytes);
      CHECK(groups[k].object.at("bucket_bytes").number == group.bucket_bytes);
    }
  }
  CHECK(Json::parse(Plan{}.json()).object.at("units").list.empty());
}

TEST_CASE("plan: JSON escapes what it must") {
  for (const std::string name : {"a \"quoted\" name", "back\\slash", "line\nbreak", "tab\tand\x01", "\xc3\xa4"}) {
    Plan plan;
    plan.mesh = name;
    plan.units.push_back({name, name, {{name, name, 1, 2, 3, 4}}});
    const auto json = Json::parse(plan.json());
    CHECK(json.object.at("mesh").text == name);
    const auto& unit = json.object.at("units").list.at(0).object;
    CHECK(unit.at("name").text == name);
    CHECK(unit.at("groups").list.at(0).object.at("device").text == name);
  }
}
