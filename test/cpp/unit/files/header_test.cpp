#include "files/in_quotes.h"
#include "files/json.h"
#include "files/marker.h"
#include "files/tensor_header.h"
#include "support/form.h"
#include "unit/files/memory_disk.h"
#include "unit/files/values.h"

#include <catch2/catch.hpp>

#include <random>

using namespace shardwise::files;
using namespace shardwise::test;
using shardwise::Error;

namespace {

/// A header without boxes, of this text.
TensorHeader parse(const std::string& text, int64_t data_bytes = 8) {
  return parse_header(text, data_bytes, "dir/f.safetensors");
}

void check_refused(const std::string& text, const std::string& why, int64_t data_bytes = 8) {
  CAPTURE(text);
  CHECK_THROWS_WITH(parse(text, data_bytes), Catch::Contains("dir/f.safetensors") && Catch::Contains(why));
  CHECK_THROWS_AS(parse(text, data_bytes), Error);
}

std::string of_one(const std::string& dtype, const std::string& shape, const std::string& range) {
  return R"({"w.x": {"dtype": ")" + dtype + R"(", "shape": )" + shape + R"(, "data_offsets": )" + range + "}}";
}

std::string with_boxes(const std::string& boxes) {
  const auto text = json_text(Json(boxes));
  return R"({"__metadata__": {"DCP_SHARDING_INFO": )" + text +
         R"(}, "w.x": {"dtype": "F32", "shape": [2, 1], "data_offsets": [0, 8]}})";
}

/// What a reader may rely on, whatever the file says.
void check_consistent(const TensorHeader& header, int64_t data_bytes) {
  int64_t end = 0;
  for (const auto& entry : header.tensors) {
    REQUIRE(entry.begin == end);
    REQUIRE(entry.end >= entry.begin);
    REQUIRE(entry.box.offsets.size() == entry.box.sizes.size());
    if (entry.unknown_dtype.empty()) {
      const auto numel = product_of(entry.box.sizes);
      REQUIRE(numel);
      REQUIRE(*numel * static_cast<int64_t>(c10::elementSize(entry.dtype)) == entry.end - entry.begin);
    }
    for (size_t dim = 0; dim < entry.box.sizes.size(); ++dim) {
      REQUIRE(entry.box.sizes[dim] >= 0);
      REQUIRE(entry.box.offsets[dim] >= 0);
      REQUIRE(entry.box.offsets[dim] <= INT64_MAX - entry.box.sizes[dim]);
    }
    end = entry.end;
  }
  REQUIRE(end == data_bytes);
}

/// Changes a text in some places: bytes, pieces that move, numbers that become odd ones.
std::string mutated(std::string text, std::mt19937& random) {
  static const std::vector<std::string> kOdd = {
      "-1",
      "9223372036854775807",
      "18446744073709551616",
      "1e400",
      "0.5",
      "null",
      "[]",
      "{}",
      "\"",
      "\\u0000",
      "\xff",
      "4611686018427387904",
      "[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[",
      "\"F64\"",
      "\"BOOL\"",
      "\"F4\"",
      ",",
      "1"};
  for (auto changes = 1 + random() % 3; changes > 0; --changes) {
    const auto at = text.empty() ? 0 : random() % text.size();
    const auto length = std::min(text.size() - at, random() % 12);
    switch (random() % 5) {
      case 0:
        if (!text.empty()) text[at] = static_cast<char>(random());
        break;
      case 1:
        text.erase(at, length);
        break;
      case 2:
        text.insert(at, text.substr(text.empty() ? 0 : random() % text.size(), length));
        break;
      case 3:
        text.replace(at, length, kOdd[random() % kOdd.size()]);
        break;
      default: {
        // A number by another one.
        const auto digit = text.find_first_of("0123456789", at);
        const auto end = text.find_first_not_of("0123456789", digit);
        if (digit != std::string::npos && end != std::string::npos)
          text.replace(digit, end - digit, kOdd[random() % 4 < 2 ? 0 : random() % kOdd.size()]);
      }
    }
  }
  return text;
}

} // namespace

TEST_CASE("checkpoint header: what safetensors does not allow is refused, with file, tensor and reason") {
  CHECK(parse(of_one("F32", "[2]", "[0, 8]")).tensors[0].box == Box::whole({2}));
  CHECK(parse(of_one("F64", "[]", "[0, 8]") + "   ").tensors[0].box == Box::whole({}));
  CHECK(parse("{}", 0).tensors.empty());
  check_refused("", "is not the JSON that it should be");
  check_refused("[]", "its header is not a JSON object");
  check_refused(" " + of_one("F32", "[2]", "[0, 8]"), "its header is not a JSON object");
  check_refused(of_one("F32", "[2]", "[0, 8]") + "x", "is not the JSON that it should be");
  check_refused(of_one("F32", "[2]", "[0, 8]") + std::string(1, '\0'), "is not the JSON that it should be");
  check_refused(R"({"w.x": 1})", "its tensor 'w.x' is not described by dtype, shape and data_offsets alone");
  check_refused(
      R"({"w.x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], "more": 1}})",
      "its tensor 'w.x' is not described");
  check_refused(R"({"w.x": {"dtype": 1, "shape": [2], "data_offsets": [0, 8]}})", "its tensor 'w.x' has no text dtype");
  CHECK(parse(of_one("F31", "[2]", "[0, 8]")).tensors[0].unknown_dtype == "F31");
  check_refused(of_one("F32", "2", "[0, 8]"), "its tensor 'w.x' has no list shape");
  for (const auto* size :
       {"-2", "2.0", "1e3", "null", "\"2\"", "[2]", "true", "9223372036854775808", "-9223372036854775809"})
    check_refused(
        of_one("F32", "[" + std::string(size) + "]", "[0, 8]"), "'w.x' has an entry of shape that is not a size");
  check_refused(of_one("F32", "[3]", "[0, 8]"), "'w.x' has 8 bytes of data, but its sizes [3] in F32 are 12");
  check_refused(
      of_one("F32", "[4611686018427387905]", "[0, 4]"), "'w.x' has the sizes [4611686018427387905], which are larger");
  check_refused(of_one("F32", "[4294967296, 4294967296]", "[0, 0]"), "which are larger than any file");
  check_refused(of_one("F32", "[2]", "[8, 0]"), "'w.x' has data_offsets that are not a range");
  check_refused(of_one("F32", "[2]", "[-8, 0]"), "'w.x' has an entry of data_offsets that is not a size");
  check_refused(of_one("F32", "[2]", "[0, 4, 8]"), "'w.x' has data_offsets that are not a range");
  check_refused(of_one("F32", "[2]", "[0, 8]"), "'w.x' ends at byte 8 of the data, of which there are 7", 7);
  check_refused(of_one("F32", "[2]", "[0, 8]"), "its tensors have 8 bytes of data, but it has 9", 9);
  check_refused(of_one("F32", "[2]", "[1, 9]"), "'w.x' begins at byte 1 of the data, and none has those from 0");
  const auto two = [](const std::string& first, const std::string& second) {
    return R"({"a": {"dtype": "U8", "shape": [4], "data_offsets": )" + first +
           R"(}, "b": {"dtype": "U8", "shape": [4], "data_offsets": )" + second + "}}";
  };
  CHECK(parse(two("[4, 8]", "[0, 4]")).tensors[0].name == "b");
  check_refused(two("[0, 4]", "[3, 7]"), "'b' begins at byte 3 of the data, inside of another one");
  check_refused(two("[0, 4]", "[0, 4]"), "'b' begins at byte 0 of the data, inside of another one");
  check_refused(two("[0, 4]", "[5, 9]"), "'b' begins at byte 5 of the data, and none has those from 4", 9);
  check_refused(R"({"a": {}, "a": {}})", "the name 'a' comes twice");
  check_refused(R"({"a": {"dtype": "U8", "dtype": "U8"}})", "the name 'dtype' comes twice");
  check_refused("{\"\xff\": 1}", "it is broken at byte");
  check_refused("{\"a\": " + std::string(100'000, '[') + std::string(100'000, ']') + "}", "nested deeper than 32");
  check_refused(of_one("F32", "[" + std::string(600, '1') + "]", "[0, 8]"), "is not the JSON that it should be");
  std::string many = "1";
  for (int i = 0; i < 64; ++i) many += ", 1";
  check_refused(of_one("F64", "[" + many + "]", "[0, 8]"), "'w.x' has 65 numbers in shape, more than 64");
}

TEST_CASE("checkpoint header: texts and boxes that are not as torch writes them are refused") {
  CHECK(parse(with_boxes(R"({"w.x": {"saved_offsets": [3, 0]}})")).tensors[0].box == Box{{3, 0}, {2, 1}});
  check_refused(R"({"__metadata__": []})", "its __metadata__ is not an object", 0);
  check_refused(R"({"__metadata__": {"a": 1}})", "its __metadata__ has 'a', which is not a string", 0);
  check_refused(with_boxes("{"), "the DCP_SHARDING_INFO of dir/f.safetensors is not the JSON");
  check_refused(with_boxes("[]"), "its DCP_SHARDING_INFO is not an object");
  check_refused(with_boxes("{}"), "its tensor 'w.x' is not in its DCP_SHARDING_INFO");
  check_refused(with_boxes(R"({"w.x": {"saved_offsets": [3]}})"), "'w.x' has the sizes [2, 1], but saved_offsets [3]");
  check_refused(with_boxes(R"({"w.x": {"saved_offsets": [-3, 0]}})"), "an entry of saved_offsets that is not a size");
  check_refused(with_boxes(R"({"w.x": {"saved_offset": [3, 0]}})"), "'w.x' has no list saved_offsets");
  check_refused(with_boxes(R"({"w.x": {"saved_offsets": [9223372036854775806, 0]}})"), "which no tensor has");
  check_refused(
      with_boxes(R"({"w.x": {"saved_offsets": [0, 0]}, "y": {"saved_offsets": []}})"),
      "name tensors that it does not have");
}

TEST_CASE("checkpoint header: a length beyond the file, or absurd, is refused before anything is read or allocated") {
  const auto length_of = [](uint64_t length, int64_t file_bytes) {
    std::string first(8, '\0');
    for (size_t i = 0; i < 8; ++i) first[i] = static_cast<char>(length >> (8 * i) & 255U);
    return header_length(
        std::string_view(first).substr(0, static_cast<size_t>(std::min<int64_t>(file_bytes, 8))), file_bytes, "f");
  };
  CHECK(length_of(100, 108) == 100);
  CHECK(length_of(100'000'000, INT64_MAX) == 100'000'000);
  for (const auto& [length, bytes] : std::vector<std::pair<uint64_t, int64_t>>{
           {101, 108},
           {100'000'001, INT64_MAX},
           {uint64_t{1} << 63, INT64_MAX},
           {UINT64_MAX, 1 << 20},
           {0, 108},
           {1, 108},
           {100, 7},
           {0, 0},
           {2, 9}}) {
    CAPTURE(length, bytes);
    CHECK_THROWS_WITH(length_of(length, bytes), Catch::Contains("f is not a safetensors file, or is broken"));
  }
  MemoryDisk disk;
  disk.create("f");
  for (size_t bytes = 0; bytes < 12; ++bytes) {
    disk.content("f") = std::string(bytes, '\x05');
    CHECK_THROWS_AS(TensorReader(disk, "f", {}), Error);
  }
}

TEST_CASE("checkpoint header: a header that was tampered with is an error or harmless") {
  std::mt19937 random(20261125);
  std::vector<TensorEntry> entries{
      {.name = "layer.weight", .dtype = c10::ScalarType::Float, .box = {{4, 0}, {3, 2}}},
      {.name = "layer.bias", .dtype = c10::ScalarType::BFloat16, .box = {{2}, {3}}},
      {.name = "step", .dtype = c10::ScalarType::Long, .box = {}}};
  const auto header = make_header(entries).substr(8);
  const auto data_bytes = entries.back().end;
  const auto rounds = by_form(30'000, 3'000'000);
  int parsed = 0;
  for (int round = 0; round < rounds; ++round) {
    const auto text = mutated(header, random);
    try {
      check_consistent(parse(text, data_bytes), data_bytes);
      ++parsed;
    } catch (const Error& error) {
      const bool names_file = std::string(error.what()).find("dir/f.safetensors") != std::string::npos;
      if (!names_file || !is_utf8(error.what())) FAIL(error.what());
    }
  }
  // Some changes, such as that of a name, leave a good header.
  CHECK(parsed > rounds / 1000);
  CHECK(parsed < rounds / 2);
}

TEST_CASE("checkpoint header: a marker or an index that was tampered with is an error or harmless") {
  MemoryDisk saved;
  some_values(1).save(saved, "step", {{"lr", 0.1}});
  const auto text = saved.content("step/shardwise.json");
  const auto begin = text.find("\"content\": ") + 11;
  const auto content = text.substr(begin, text.size() - begin - 2);
  const std::string index =
      R"({"metadata": {"total_size": 9}, "weight_map": {"layer.weight": "shard-00001-model-00001-of-00001.safetensors"}})";
  std::mt19937 random(1);
  for (int round = 0; round < by_form(6'000, 600'000); ++round) {
    const auto changed = mutated(content, random);
    const auto disk = saved.copy();
    // As one who can compute checksums would do it.
    disk->content("step/shardwise.json") =
        "{\"version\": 1, \"checksum\": \"" + checksum_text(checksum(changed)) + "\",\n\"content\": " + changed + "}\n";
    const auto foreign = saved.copy();
    foreign->remove_file("step/shardwise.json");
    foreign->remove_file("step/shard-00001-model-00001-of-00001.safetensors");
    write_tensor_file(
        *foreign, "step/shard-00001-model-00001-of-00001.safetensors", some_values(1).shard(0), FileKind::whole);
    write_file(*foreign, "step/model.safetensors.index.json", mutated(index, random));
    for (auto* each : {disk.get(), foreign.get()}) {
      try {
        SavedFolder folder(*each, "step");
        for (const auto& [name, tensor] : folder.index().tensors) bytes_of(folder, name);
      } catch (const Error& error) {
        if (std::string(error.what()).find("step") == std::string::npos || !is_utf8(error.what())) FAIL(error.what());
      }
    }
  }
}

TEST_CASE("checkpoint header: JSON keeps its limits, and texts in errors are printable") {
  CHECK(
      parse_json(" [1, -2.5e3, \"\\u00e9\", true, null, {\"a\": []}] ", "x") ==
      Json(Json::List{1, -2500.0, "\xc3\xa9", true, Json(), Json::Object{{"a", Json::List{}}}}));
  CHECK(json_text(parse_json(R"({"a": [1, 0.1, "x\n"], "b": {}})", "x")) == R"({"a": [1, 0.1, "x\n"], "b": {}})");
  CHECK(parse_json("18446744073709551615", "x") == Json(18446744073709551615.0));
  std::string many = "[0";
  for (size_t i = 0; i < kMostJsonValues; ++i) many += ",0";
  CHECK_THROWS_WITH(parse_json(many + "]", "x"), Catch::Contains("more than 5000000 values"));
  CHECK_THROWS_WITH(parse_json(std::string(10'000'000, '['), "x"), Catch::Contains("nested deeper"));
  CHECK(in_quotes("caf\xc3\xa9") == "'caf\xc3\xa9'");
  CHECK(in_quotes(std::string("a\n\0\x7f\xff\xc3", 6)) == "'a\\x0a\\x00\\x7f\\xff\\xc3'");
  CHECK(in_quotes(std::string(1000, 'x')).size() < 210);
  for (const auto* bad :
       {"\xc0\x80", "\xe0\x80\x80", "\xed\xa0\x80", "\xf4\x90\x80\x80", "\xf8\x88\x80\x80\x80", "\x80"})
    CHECK_FALSE(is_utf8(bad));
  for (const auto* good : {"", "a", "\xc2\x80", "\xe0\xa0\x80", "\xef\xbf\xbf", "\xf0\x90\x80\x80", "\xf4\x8f\xbf\xbf"})
    CHECK(is_utf8(good));
}
