#include "files/marker.h"
#include "files/names.h"
#include "unit/files/memory_disk.h"
#include "unit/files/values.h"

#include <catch2/catch.hpp>

#include <cmath>
#include <limits>

using namespace shardwise::files;
using namespace shardwise::test;
using shardwise::Error;
using shardwise::ValueError;

namespace {

/// A marker's text with this content, whose checksum is right.
std::string text_around(const std::string& content) {
  return "{\"version\": 1, \"checksum\": \"" + checksum_text(checksum(content)) + "\",\n\"content\": " + content +
         "}\n";
}

} // namespace

TEST_CASE("checkpoint marker: the program's own values come back as they were") {
  constexpr auto kInfinity = std::numeric_limits<double>::infinity();
  Marker marker;
  marker.world = 3;
  marker.values = {
      {"step", 12},
      {"most", INT64_MAX},
      {"least", INT64_MIN},
      {"loss", 0.1},
      {"one", 1.0},
      {"tiny", 5e-324},
      {"best", kInfinity},
      {"list", Json::List{-kInfinity, Json::List{"a", false}, Json::List{}}},
      {"text", "caf\xc3\xa9 \"\\\n\x01 \xf0\x9f\x98\x80"},
      {"", ""}};
  marker.files = {{.name = "a.safetensors", .bytes = 9, .header_bytes = 8, .header_checksum = ~0ULL, .blocks = {7}}};
  const auto text = marker_text(marker);
  CHECK(parse_marker(text, "m") == marker);
  CHECK(parse_json(text, "m").find("content")->find("world")->as<int64_t>() != nullptr);

  marker.values = {{"nan", std::nan("")}};
  CHECK(std::isnan(*parse_marker(marker_text(marker), "m").values[0].second.as<double>()));
}

TEST_CASE("checkpoint marker: values of other kinds are refused, by name") {
  Json deep = 1;
  for (int i = 0; i < 40; ++i) deep = Json::List{deep};
  for (const auto& value : {Json(), Json(Json::Object{{"a", 1}}), Json(Json::List{Json()})}) {
    Marker marker;
    marker.values = {{"optimizer.note", value}};
    CHECK_THROWS_WITH(marker_text(marker), Catch::Contains("the value 'optimizer.note' cannot be saved"));
    CHECK_THROWS_AS(marker_text(marker), ValueError);
  }
  Marker marker;
  marker.values = {{"deep", deep}};
  CHECK_THROWS_AS(marker_text(marker), ValueError);
  marker.values = {{"text", "\xff"}};
  CHECK_THROWS_WITH(marker_text(marker), Catch::Contains("'\\xff' is not valid UTF-8"));
}

TEST_CASE("checkpoint marker: another version of the format is named") {
  const auto text = marker_text({});
  const std::string one = "{\"version\": 1";
  CHECK_THROWS_WITH(
      parse_marker("{\"version\": 2" + text.substr(one.size()), "step/shardwise.json"),
      Catch::Contains("the checkpoint of step/shardwise.json has version '2'") &&
          Catch::Contains("reads version 1. Load it with the version of shardwise that saved it"));
}

TEST_CASE("checkpoint marker: a content that no save writes is refused") {
  Marker marker;
  marker.files = {{.name = "a.safetensors", .bytes = 9, .header_bytes = 8, .header_checksum = 1, .blocks = {7}}};
  const auto text = marker_text(marker);
  const auto begin = text.find("\"content\": ") + 11;
  const auto content = text.substr(begin, text.size() - begin - 2);
  CHECK_NOTHROW(parse_marker(text_around(content), "m"));
  const auto with = [&](const std::string& from, const std::string& to) {
    auto changed = content;
    const auto at = changed.find(from);
    REQUIRE(at != std::string::npos);
    return text_around(changed.replace(at, from.size(), to));
  };
  for (const auto& [from, to] : std::vector<std::pair<std::string, std::string>>{
           {"\"world\": 1", "\"world\": -1"},
           {"\"world\": 1", "\"world\": \"1\""},
           {"\"world\": 1", "\"worlds\": 1"},
           {"\"world\": 1", "\"world\": 1, \"world\": 1"},
           {"\"values\": {}", "\"values\": []"},
           {"\"values\": {}", "\"values\": {\"a\": null}"},
           {"\"values\": {}", "\"values\": {\"a\": {\"number\": \"infinite\"}}"},
           {"\"block_bytes\": 4194304", "\"block_bytes\": 1"},
           {"a.safetensors", "../a.safetensors"},
           {"a.safetensors", "/a.safetensors"},
           {"a.safetensors", "a\\u0000.safetensors"},
           {"a.safetensors", "a.txt"},
           {"\"bytes\": 9", "\"bytes\": 7"},
           {"\"bytes\": 9", "\"bytes\": 8"},
           {"\"bytes\": 9", "\"bytes\": 9223372036854775807"},
           {"\"bytes\": 9", "\"bytes\": 9.0"},
           {"\"header_bytes\": 8", "\"header_bytes\": 9"},
           {"0000000000000007", "000000000000000"},
           {"0000000000000007", "000000000000000G"},
           {"0000000000000001", "1"},
           {"\"files\": [", "\"files\": [1, "},
       }) {
    CAPTURE(from, to);
    CHECK_THROWS_WITH(parse_marker(with(from, to), "a/m"), Catch::Contains("a/m"));
    CHECK_THROWS_AS(parse_marker(with(from, to), "a/m"), Error);
  }
  CHECK_THROWS_WITH(parse_marker(text_around("{}"), "m"), Catch::Contains("it has no save"));
  CHECK_THROWS_WITH(parse_marker(text_around("1"), "m"), Catch::Contains("it has no save"));
  for (size_t length = 0; length < text.size(); ++length)
    CHECK_THROWS_AS(parse_marker(text.substr(0, length), "m"), Error);
  CHECK_THROWS_AS(parse_marker(text + " ", "m"), Error);
}

TEST_CASE("checkpoint marker: files that are missing, too many or of another size are named") {
  const auto values = some_values(1);
  const auto file = tensor_file_name(2, 1, 1);
  const auto saved = [&] {
    auto disk = std::make_unique<MemoryDisk>();
    values.save(*disk, "step");
    return disk;
  };
  auto disk = saved();
  disk->create("step/README.md");
  CHECK(values.are_in(*disk, "step"));
  disk->create("step/other.safetensors");
  CHECK_THROWS_WITH(
      values.are_in(*disk, "step"), Catch::Contains("step/other.safetensors is there, but was not saved"));
  disk = saved();
  disk->create("step/model.safetensors.index.json");
  CHECK_THROWS_WITH(values.are_in(*disk, "step"), Catch::Contains("is there, but was not saved"));
  disk = saved();
  disk->remove_file("step/" + file);
  CHECK_THROWS_WITH(values.are_in(*disk, "step"), Catch::Contains("step/" + file + " is missing"));
  disk = saved();
  disk->content("step/" + file).pop_back();
  CHECK_THROWS_WITH(values.are_in(*disk, "step"), Catch::Contains("step/" + file + " has"));
  disk = saved();
  disk->content("step/" + file) += '\0';
  CHECK_THROWS_WITH(values.are_in(*disk, "step"), Catch::Contains("step/" + file + " has"));
}

TEST_CASE("checkpoint marker: a bit that flips anywhere is an error that names the file, never a wrong tensor") {
  MemoryDisk saved;
  const auto values = some_values(1);
  values.save(saved, "step", {{"lr", 0.1}, {"note", "x"}});
  std::mt19937 random(5);
  std::vector<std::string> names = saved.list("step");
  REQUIRE(names.size() == 3);
  for (int round = 0; round < 1500; ++round) {
    const auto disk = saved.copy();
    const auto& name = names[round % names.size()];
    auto& content = disk->content("step/" + name);
    // The lengths and headers are as long as the data, or longer: half of the flips are in the data.
    const auto data = std::min<size_t>(content.size(), 100);
    const auto at = round % 2 == 0 ? random() % content.size() : content.size() - 1 - random() % data;
    content[at] = static_cast<char>(content[at] ^ (1 << random() % 8));
    CAPTURE(name, at);
    CHECK_THROWS_WITH(values.are_in(*disk, "step"), Catch::Contains(name));
    const auto found = [&]() -> bool {
      try {
        return !verify_checkpoint(*disk, "step").empty();
      } catch (const Error&) {
        return true;
      }
    };
    CHECK(found());
  }
  CHECK(verify_checkpoint(saved, "step").empty());
}
