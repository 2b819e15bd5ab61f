#include <shardwise/plan.h>
#include <catch2/catch.hpp>
#include <nlohmann/json.hpp>

#include <sstream>

using nlohmann::json;
using shardwise::Plan;

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

TEST_CASE("plan: JSON has everything") {
  const auto plan = example();
  auto units = json::array();
  for (const auto& unit : plan.units) {
    auto axes = json::array();
    for (const auto& [name, size] : unit.axes) axes.push_back({{"name", name}, {"size", size}});
    auto groups = json::array();
    for (const auto& group : unit.groups) {
      const auto traffic = [](const Plan::Traffic& of) { return json{{"calls", of.calls}, {"bytes", of.bytes}}; };
      groups.push_back(
          {{"dtype", group.dtype},
           {"compute_dtype", group.compute_dtype},
           {"reduce_dtype", group.reduce_dtype},
           {"device", group.device},
           {"layout", group.layout},
           {"parameters", group.parameters},
           {"elements", group.elements},
           {"bytes", group.bytes},
           {"shard_bytes", group.shard_bytes},
           {"padding_bytes", group.padding_bytes},
           {"full_bytes", group.full_bytes},
           {"bucket_bytes", group.bucket_bytes},
           {"forward_gathers", traffic(group.forward_gathers)},
           {"backward_gathers", traffic(group.backward_gathers)},
           {"reduce_scatters", traffic(group.reduce_scatters)},
           {"all_reduces", traffic(group.all_reduces)}});
    }
    units.push_back(
        {{"name", unit.name}, {"kind", unit.kind}, {"axes", axes}, {"reshard", unit.reshard}, {"groups", groups}});
  }
  CHECK(json::parse(plan.json()) == json{{"mesh", plan.mesh}, {"units", units}});
}
