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
  plan.units.push_back(
      {.name = "blocks.0",
       .kind = "fully_shard",
       .axes = {{"copies", 2}, {"shards", 4}},
       .reshard = "after forward",
       .groups = {
           {.dtype = "float32",
            .compute_dtype = "bfloat16",
            .reduce_dtype = "float32",
            .device = "cpu",
            .layout = "rows",
            .parameters = 12,
            .elements = 1'500'000,
            .bytes = 6'000'000,
            .shard_bytes = 1'510'000,
            .padding_bytes = 10'000,
            .full_bytes = 3'000'000,
            .bucket_bytes = 6'040'128,
            .forward_gathers = {1, 755'000},
            .backward_gathers = {2, 755'001},
            .reduce_scatters = {3, 6'040'128},
            .all_reduces = {4, 1'510'032}}}});
  Plan::Group small;
  small.dtype = small.compute_dtype = small.reduce_dtype = "float32";
  small.device = "cpu";
  small.layout = "replicated";
  small.parameters = 2;
  small.elements = 1'000;
  small.bytes = small.shard_bytes = 4'000;
  auto other = small;
  other.dtype = other.compute_dtype = other.reduce_dtype = "bfloat16";
  other.device = "cuda:1";
  plan.units.push_back(
      {.name = "", .kind = "replicate", .axes = {{"world", 8}}, .reshard = "-", .groups = {small, other}});
  return plan;
}

std::vector<std::string> axis_groups_of(const std::string& text) {
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
  const auto lines = axis_groups_of(example().table());
  REQUIRE(lines.size() == 6);
  using Words = std::vector<std::string>;
  CHECK(lines[0] == "Mesh(world=4; rank 1 on cpu)");
  CHECK(
      words_of(lines[2]) == Words{
                                "blocks.0", "fully_shard", "rows", "after", "forward", "float32/bfloat16/float32", "12",
                                "1500000", "6.00", "1.51", "0.01", "3.00", "6.04", "1+2", "3", "4", "9.06"});
  CHECK(
      words_of(lines[3]) == Words{
                                "(root)", "replicate", "replicated", "-", "float32", "2", "1000", "0.00", "0.00",
                                "0.00", "0.00", "0.00", "0+0", "0", "0", "0.00"});
  CHECK(words_of(lines[4])[4] == "bfloat16");
  CHECK(
      words_of(lines[5]) ==
      Words{"sum", "16", "1502000", "6.01", "1.52", "0.01", "3.00", "6.04", "1+2", "3", "4", "9.06"});
  for (size_t i = 2; i < lines.size(); ++i) CHECK(lines[i].size() == lines[1].size());
}

TEST_CASE("plan: the table of nothing") {
  const auto lines = axis_groups_of(Plan{.mesh = "Mesh(world=1; rank 0 on cpu)", .units = {}}.table());
  REQUIRE(lines.size() == 3);
  CHECK(words_of(lines[2]).size() == 12);
  CHECK(words_of(lines[2])[0] == "sum");
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
    CHECK(units[i].object.at("reshard").text == plan.units[i].reshard);
    const auto& axes = units[i].object.at("axes").list;
    REQUIRE(axes.size() == plan.units[i].axes.size());
    for (size_t k = 0; k < axes.size(); ++k) {
      CHECK(axes[k].object.at("name").text == plan.units[i].axes[k].first);
      CHECK(axes[k].object.at("size").number == plan.units[i].axes[k].second);
    }
    const auto& groups = units[i].object.at("groups").list;
    REQUIRE(groups.size() == plan.units[i].groups.size());
    for (size_t k = 0; k < groups.size(); ++k) {
      const auto& group = plan.units[i].groups[k];
      const auto& fields = groups[k].object;
      CHECK(fields.at("dtype").text == group.dtype);
      CHECK(fields.at("compute_dtype").text == group.compute_dtype);
      CHECK(fields.at("reduce_dtype").text == group.reduce_dtype);
      CHECK(fields.at("device").text == group.device);
      CHECK(fields.at("layout").text == group.layout);
      CHECK(fields.at("parameters").number == group.parameters);
      CHECK(fields.at("elements").number == group.elements);
      CHECK(fields.at("bytes").number == group.bytes);
      CHECK(fields.at("shard_bytes").number == group.shard_bytes);
      CHECK(fields.at("padding_bytes").number == group.padding_bytes);
      CHECK(fields.at("full_bytes").number == group.full_bytes);
      CHECK(fields.at("bucket_bytes").number == group.bucket_bytes);
      const auto check = [&](const char* name, const Plan::Traffic& traffic) {
        CHECK(fields.at(name).object.at("calls").number == traffic.calls);
        CHECK(fields.at(name).object.at("bytes").number == traffic.bytes);
      };
      check("forward_gathers", group.forward_gathers);
      check("backward_gathers", group.backward_gathers);
      check("reduce_scatters", group.reduce_scatters);
      check("all_reduces", group.all_reduces);
    }
  }
  CHECK(Json::parse(Plan{}.json()).object.at("units").list.empty());
}

TEST_CASE("plan: JSON escapes what it must") {
  for (const std::string name : {"a \"quoted\" name", "back\\slash", "line\nbreak", "tab\tand\x01", "\xc3\xa4"}) {
    Plan plan;
    plan.mesh = name;
    Plan::Group group;
    group.device = name;
    plan.units.push_back({.name = name, .kind = name, .axes = {}, .reshard = name, .groups = {group}});
    const auto json = Json::parse(plan.json());
    CHECK(json.object.at("mesh").text == name);
    const auto& unit = json.object.at("units").list.at(0).object;
    CHECK(unit.at("name").text == name);
    CHECK(unit.at("groups").list.at(0).object.at("device").text == name);
  }
}
