#include "files/saved_folder.h"
#include "files/tensor_header.h"
#include "unit/files/faulty_disk.h"
#include "unit/files/memory_disk.h"
#include "unit/files/values.h"

#include <catch2/catch.hpp>

using namespace shardwise::files;
using namespace shardwise::test;
using shardwise::Error;
using shardwise::ValueError;

namespace {

TensorToWrite tensor_of(const std::string& name, const Box& box, const std::string& bytes) {
  return {.name = name, .dtype = c10::ScalarType::Byte, .box = box, .data = {std::as_bytes(std::span(bytes))}};
}

} // namespace

TEST_CASE("checkpoint files: the header is that of torch's writer, aligned") {
  std::vector<TensorEntry> tensors{
      {.name = "b", .dtype = c10::ScalarType::Char, .box = {{4}, {3}}},
      {.name = "a\"", .dtype = c10::ScalarType::Double, .box = {{2, 0}, {1, 2}}}};
  const auto header = make_header(tensors);
  CHECK(header.size() % 8 == 0);
  const std::string expected = R"({"__metadata__": {"format": "pt", "DCP_VERSION": "1.0", "DCP_SHARDING_INFO": )"
                               R"("{\"a\\\"\": {\"saved_offsets\": [2, 0]}, \"b\": {\"saved_offsets\": [4]}}", )"
                               R"("WRITTEN_BY": "shardwise"}, )"
                               R"("a\"": {"dtype": "F64", "shape": [1, 2], "data_offsets": [0, 16]}, )"
                               R"("b": {"dtype": "I8", "shape": [3], "data_offsets": [16, 19]}})";
  CHECK(header.substr(8, expected.size()) == expected);
  CHECK(header.find_first_not_of(' ', 8 + expected.size()) == std::string::npos);
  CHECK(header_length(header.substr(0, 8), 1000, "f") == static_cast<int64_t>(header.size()) - 8);

  const auto parsed = parse_header(std::string_view(header).substr(8), 19, "f");
  REQUIRE(parsed.tensors.size() == 2);
  CHECK(parsed.tensors[0].name == "a\"");
  CHECK(parsed.tensors[1].box == Box{{4}, {3}});
  CHECK(parsed.texts.at("format") == "pt");

  const auto whole = make_header(tensors, FileKind::whole);
  CHECK(whole.substr(8).starts_with(R"({"__metadata__": {"format": "pt"}, "a\"": {)"));
}

TEST_CASE("checkpoint files: every dtype of safetensors comes back as it was") {
  std::mt19937 random(7);
  Values values;
  for (const auto& [name, dtype] : kNamedDtypes) {
    CHECK(dtype_name(dtype, "x") == name);
    CHECK(dtype_of(name) == dtype);
    values.add(name, dtype, {3, 5}, 2, random);
  }
  CHECK(kNamedDtypes.size() == 20);
  values.add("scalar", c10::ScalarType::Float, {}, 2, random).add("none", c10::ScalarType::Half, {2, 0}, 2, random);
  MemoryDisk disk;
  values.save(disk, "step");
  CHECK(values.are_in(disk, "step"));
}

TEST_CASE("checkpoint files: two elements of F4 are one of torch's") {
  std::vector<TensorEntry> tensors{{.name = "x", .dtype = c10::ScalarType::Float4_e2m1fn_x2, .box = {{1, 2}, {3, 5}}}};
  const auto header = make_header(tensors).substr(8);
  CHECK(header.find(R"("shape": [3, 10], "data_offsets": [0, 15])") != std::string::npos);
  CHECK(parse_header(header, 15, "f").tensors[0].box == Box{{1, 2}, {3, 5}});
  tensors[0].box = {};
  CHECK_THROWS_WITH(make_header(tensors), Catch::Contains("'x' cannot be saved: it has no dimensions"));
  CHECK_THROWS_WITH(
      parse_header(R"({"x": {"dtype": "F4", "shape": [3], "data_offsets": [0, 2]}})", 2, "f"),
      Catch::Contains("'x' has the sizes [3], but elements of F4 come in pairs"));
}

TEST_CASE("checkpoint files: what cannot be written is refused before anything is") {
  MemoryDisk inner;
  FaultyDisk disk(inner);
  const auto bytes = some_bytes(6);
  auto complex = tensor_of("model.weight", Box::whole({3}), bytes);
  complex.dtype = c10::ScalarType::ComplexDouble;
  const auto refused = [&](const std::vector<TensorToWrite>& tensors, const std::string& why) {
    CHECK_THROWS_WITH(write_tensor_file(disk, "f", tensors), Catch::Contains(why));
    CHECK_THROWS_AS(write_tensor_file(disk, "f", tensors), ValueError);
  };
  refused({complex}, "'model.weight' cannot be saved: safetensors files have no dtype ComplexDouble");
  refused({tensor_of("x", Box::whole({7}), bytes)}, "'x' cannot be saved: 6 bytes were given, but [7] at [0]");
  refused({tensor_of("x", {{0}, {2, 3}}, bytes)}, "is not a piece of a tensor");
  refused({tensor_of("x", {{-1}, {6}}, bytes)}, "is not a piece of a tensor");
  refused({tensor_of("x", {{INT64_MAX}, {6}}, bytes)}, "is not a piece of a tensor");
  refused({tensor_of("x", Box::whole({INT64_MAX, 6}), bytes)}, "is not a piece of a tensor");
  const auto x = tensor_of("x", Box::whole({6}), bytes);
  refused({x, x}, "'x' would come twice in one file");
  for (const auto* name : {"", "__metadata__", "caf\xe9", "\xed\xa0\x80"}) {
    refused({tensor_of(name, Box::whole({6}), bytes)}, "a name is a text in UTF-8");
  }
  CHECK(disk.steps().empty());
}

TEST_CASE("checkpoint files: blocks have checksums, however the values are handed over") {
  const auto bytes = some_bytes(static_cast<size_t>(2 * kBlockBytes + 1000));
  const auto all = std::as_bytes(std::span(bytes));
  MemoryDisk disk;
  const auto numel = static_cast<int64_t>(bytes.size());
  const auto whole = write_tensor_file(disk, "whole", {tensor_of("x", Box::whole({numel}), bytes)});
  auto tensor = tensor_of("x", Box::whole({numel}), bytes);
  tensor.data.clear();
  for (size_t at = 0, length = 1; at < all.size(); at += length, length = length * 3 + 1)
    tensor.data.push_back(all.subspan(at, std::min(length, all.size() - at)));
  const auto pieces = write_tensor_file(disk, "pieces", {tensor});
  CHECK(disk.content("whole") == disk.content("pieces"));
  CHECK(whole.blocks == pieces.blocks);
  REQUIRE(whole.blocks.size() == 3);
  CHECK(whole.blocks[1] == checksum(all.subspan(kBlockBytes, kBlockBytes)));
  CHECK(whole.header_checksum == checksum(disk.content("whole").substr(0, whole.header_bytes)));
  CHECK(whole.bytes == static_cast<int64_t>(disk.content("whole").size()));
}

TEST_CASE("checkpoint files: a reader verifies the blocks that it touches, and only these") {
  const auto bytes = some_bytes(static_cast<size_t>(3 * kBlockBytes + 1000));
  const auto numel = static_cast<int64_t>(bytes.size());
  MemoryDisk disk;
  const auto record = write_tensor_file(disk, "f", {tensor_of("x", Box::whole({numel}), bytes)});
  disk.content("f")[record.header_bytes + kBlockBytes + 5] ^= 1;
  TensorReader reader(disk, "f", record);
  const auto read = [&](int64_t from, int64_t count) {
    std::string found(static_cast<size_t>(count), '\0');
    reader.read(from, std::as_writable_bytes(std::span(found)), "x");
    return found == bytes.substr(static_cast<size_t>(from), found.size());
  };
  CHECK(read(0, kBlockBytes));
  CHECK(read(kBlockBytes - 3, 3));
  CHECK(read(2 * kBlockBytes, kBlockBytes + 1000));
  CHECK(read(2 * kBlockBytes + 7, 11));
  CHECK(read(numel, 0));
  const auto first = record.header_bytes + kBlockBytes;
  const auto where = "its bytes " + std::to_string(first) + " to " + std::to_string(first + kBlockBytes);
  for (const auto& [from, count] :
       {std::pair<int64_t, int64_t>{kBlockBytes, kBlockBytes}, {0, numel}, {kBlockBytes + 100, 1}}) {
    CHECK_THROWS_WITH(read(from, count), Catch::Contains("the values of 'x' in f") && Catch::Contains(where));
    // Nor after another error of the same block.
    CHECK_THROWS_AS(read(from, count), Error);
  }
  // A block that goes straight to where it is wanted, before any other.
  TensorReader fresh(disk, "f", record);
  std::vector<std::byte> block(static_cast<size_t>(kBlockBytes));
  CHECK_THROWS_WITH(fresh.read(kBlockBytes, block, "x"), Catch::Contains(where));
  CHECK_THROWS_AS(read(numel - 1, 2), ValueError);
  CHECK_THROWS_AS(read(-1, 2), ValueError);
}

TEST_CASE("checkpoint files: a file of another size than its record's is refused before it is read") {
  const auto bytes = some_bytes(100);
  MemoryDisk disk;
  const auto record = write_tensor_file(disk, "f", {tensor_of("x", Box::whole({100}), bytes)});
  disk.content("f") += 'x';
  const auto text = "f has " + std::to_string(record.bytes + 1) + " bytes, but " + std::to_string(record.bytes);
  CHECK_THROWS_WITH(TensorReader(disk, "f", record), Catch::Contains(text));
  disk.content("f").resize(static_cast<size_t>(record.bytes) - 1);
  CHECK_THROWS_WITH(TensorReader(disk, "f", record), Catch::Contains("it was cut off"));
}

TEST_CASE("checkpoint files: small reads in a row go to the disk once a block") {
  const auto bytes = some_bytes(100'000);
  MemoryDisk inner;
  const auto record = write_tensor_file(inner, "f", {tensor_of("x", Box::whole({100, 1000}), bytes)});
  FaultyDisk disk(inner);
  TensorReader reader(disk, "f", record);
  const auto before = disk.steps().size();
  std::string column(100, '\0');
  for (size_t row = 0; row < 100; ++row) {
    reader.read(static_cast<int64_t>(row * 1000 + 3), std::as_writable_bytes(std::span(column)).subspan(row, 1), "x");
    CHECK(column[row] == bytes[row * 1000 + 3]);
  }
  CHECK(disk.steps().size() == before + 1);
}

TEST_CASE("checkpoint files: a read that cannot be is refused") {
  MemoryDisk disk;
  some_values(1).save(disk, "step");
  SavedFolder folder(disk, "step");
  std::vector<std::byte> memory(12);
  CHECK_THROWS_WITH(folder.read("layer.wait", {{0}, {3}}, memory), Catch::Contains("has no tensor 'layer.wait'"));
  CHECK_THROWS_WITH(
      folder.read("layer.weight", {{5, 0}, {1, 3}}, memory),
      Catch::Contains("'layer.weight' cannot be read from step as [1, 3] at [5, 0]"));
  CHECK_THROWS_WITH(folder.read("layer.weight", {{4, 0}, {1, 2}}, memory), Catch::Contains("into 12 bytes"));
  CHECK_THROWS_AS(folder.read("layer.weight", {{0}, {3}}, memory), ValueError);
  folder.read("layer.weight", {{4, 0}, {1, 3}}, memory);
}
