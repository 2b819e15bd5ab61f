#include "files/torch_file.h"
#include "support/form.h"
#include "unit/files/faulty_disk.h"
#include "unit/files/memory_disk.h"
#include "unit/files/values.h"

#include <c10/util/StringUtil.h>
#include <catch2/catch.hpp>

#include <random>

using namespace shardwise::files;
using namespace shardwise::test;
using shardwise::Error;
using shardwise::ValueError;

namespace {

std::string number_text(uint64_t number, size_t bytes) {
  std::string text(bytes, '\0');
  for (size_t i = 0; i < bytes; ++i) text[i] = static_cast<char>(number >> (8 * i) & 255U);
  return text;
}

// A pickle, in the operations that Python writes.

std::string text(const std::string& value) {
  return "X" + number_text(value.size(), 4) + value;
}
std::string number(int64_t value) {
  return std::string("\x8a\x08", 2) + number_text(static_cast<uint64_t>(value), 8);
}
std::string tuple(const std::vector<std::string>& items) {
  return "(" + c10::Join("", items) + "t";
}
std::string numbers(const Sizes& values) {
  std::vector<std::string> items;
  for (const auto value : values) items.push_back(number(value));
  return tuple(items);
}
std::string global(const std::string& module, const std::string& name) {
  return "c" + module + "\n" + name + "\n";
}
std::string call(const std::string& callee, const std::vector<std::string>& arguments) {
  return callee + tuple(arguments) + "R";
}
using Items = std::vector<std::pair<std::string, std::string>>;
std::string items(const Items& values) {
  std::string result = "(";
  for (const auto& [key, value] : values) result += text(key) + value;
  return result + "u";
}
std::string dict(const Items& values) {
  return "}" + items(values);
}
/// With the versions of modules, as state_dict() has them.
std::string ordered_dict(const Items& values) {
  const auto empty = call(global("collections", "OrderedDict"), {});
  return empty + items(values) + "}" + text("_metadata") + empty + "sb";
}
std::string memory(const std::string& type, const std::string& key, int64_t elements) {
  return tuple({text("storage"), global("torch", type), text(key), text("cuda:0"), number(elements)}) + "Q";
}
std::string tensor(
    const std::string& type, const std::string& key, int64_t elements, int64_t offset, const Sizes& sizes,
    const Sizes& strides) {
  return call(
      global("torch._utils", "_rebuild_tensor_v2"),
      {memory(type, key, elements), number(offset), numbers(sizes), numbers(strides), "\x89",
       call(global("collections", "OrderedDict"), {})});
}
std::string whole(const std::string& value) {
  return std::string("\x80\x02") + value + ".";
}

/// A zip archive.
class Zip {
 public:
  Zip& add(const std::string& name, const std::string& content, int method = 0) {
    const auto size = number_text(content.size(), 4);
    const auto fields = [&](const std::string& sizes) {
      return number_text(0, 2) + number_text(static_cast<uint64_t>(method), 2) + number_text(0, 8) + sizes + sizes +
             number_text(name.size(), 2);
    };
    directory_ += "PK\x01\x02" + number_text(0, 4) + fields(is_large_ ? "\xff\xff\xff\xff" : size) +
                  number_text(is_large_ ? 28 : 0, 2) + number_text(0, 10) +
                  (is_large_ ? "\xff\xff\xff\xff" : number_text(text_.size(), 4)) + name;
    if (is_large_) {
      directory_ += number_text(1, 2) + number_text(24, 2) + number_text(content.size(), 8) +
                    number_text(content.size(), 8) + number_text(text_.size(), 8);
    }
    // Sizes are in the directory alone, and the content is aligned.
    text_ += "PK\x03\x04" + number_text(0, 2) + fields(number_text(0, 4)) + number_text(5, 2) + name + "pad..";
    text_ += content;
    ++count_;
    return *this;
  }
  std::string finish() const {
    auto result = text_ + directory_;
    if (is_large_) {
      result += "PK\x06\x06" + number_text(44, 8) + number_text(0, 12) + number_text(count_, 8) +
                number_text(count_, 8) + number_text(directory_.size(), 8) + number_text(text_.size(), 8);
      result += "PK\x06\x07" + number_text(0, 4) + number_text(text_.size() + directory_.size(), 8) + number_text(1, 4);
    }
    const auto ends =
        is_large_ ? std::string(8, '\xff') : number_text(directory_.size(), 4) + number_text(text_.size(), 4);
    return result + "PK\x05\x06" + number_text(0, 8) + ends + number_text(0, 2);
  }
  /// As torch writes it, for files of any size.
  static Zip large() {
    Zip zip;
    zip.is_large_ = true;
    return zip;
  }

 private:
  bool is_large_ = false;
  uint64_t count_ = 0;
  std::string text_;
  std::string directory_;
};

std::string file_of(const std::string& pickle, Zip zip = Zip::large()) {
  return zip.add("m/data.pkl", pickle)
      .add("m/byteorder", "little")
      .add("m/data/0", some_bytes(96))
      .add("m/data/1", some_bytes(6))
      .add("m/data/2", "")
      .finish();
}

MemoryDisk& put(MemoryDisk& disk, const std::string& content) {
  if (!disk.kind("m.pt")) disk.create("m.pt");
  disk.content("m.pt") = content;
  return disk;
}

SavedFolder opened(MemoryDisk& disk, const std::string& content, const std::string& entry = "") {
  return {put(disk, content), "m.pt", entry};
}

/// What a box of a tensor has, by the definition of strides.
std::string expected(const std::string& memory, const Box& box, int64_t offset, const Sizes& strides, int64_t item) {
  std::string result;
  Sizes index(box.sizes.size(), 0);
  for (auto left = box.numel(); left > 0; --left) {
    auto from = offset;
    for (size_t dim = 0; dim < index.size(); ++dim) from += (box.offsets[dim] + index[dim]) * strides[dim];
    result += memory.substr(static_cast<size_t>(from * item), static_cast<size_t>(item));
    for (auto dim = index.size(); dim-- > 0 && ++index[dim] == box.sizes[dim];) index[dim] = 0;
  }
  return result;
}

/// A state dict with tensors of all kinds.
const Items& kinds() {
  static const Items result{
      {"whole", tensor("FloatStorage", "0", 24, 0, {4, 6}, {6, 1})},
      {"tied", tensor("FloatStorage", "0", 24, 0, {4, 6}, {6, 1})},
      {"rows", tensor("FloatStorage", "0", 24, 6, {2, 6}, {6, 1})},
      {"columns", tensor("FloatStorage", "0", 24, 2, {4, 3}, {6, 1})},
      {"transposed", tensor("FloatStorage", "0", 24, 0, {6, 4}, {1, 6})},
      {"steps", tensor("FloatStorage", "0", 24, 1, {2, 2, 3}, {12, 1, 2})},
      {"parameter",
       call(
           global("torch._utils", "_rebuild_parameter"),
           {tensor("BFloat16Storage", "1", 3, 1, {2}, {1}), "\x88", call(global("collections", "OrderedDict"), {})})},
      {"later", call(
                    global("torch._utils", "_rebuild_tensor_v3"),
                    {memory("UntypedStorage", "1", 6), number(1), numbers({5}), numbers({1}), "\x89",
                     call(global("collections", "OrderedDict"), {}), global("torch", "float8_e5m2")})},
      {"bool", tensor("BoolStorage", "1", 6, 5, {}, {})},
      {"none", tensor("CharStorage", "2", 0, 0, {0, 3}, {3, 1})},
      {"_extra_state", dict({{"a", number(1)}})}};
  return result;
}

void check_refused(const std::string& content, const std::string& why, const std::string& entry = "") {
  MemoryDisk disk;
  CHECK_THROWS_WITH(opened(disk, content, entry), Catch::Contains("m.pt") && Catch::Contains(why));
  CHECK_THROWS_AS(opened(disk, content, entry), Error);
}

void check_tensor_refused(const std::string& made, const std::string& why) {
  check_refused(file_of(whole(ordered_dict({{"w.x", made}}))), why);
}

} // namespace

TEST_CASE("torch file: each tensor of a state dict is read where it lies, whole and in pieces") {
  struct Place {
    std::string name;
    int64_t offset;
    Sizes sizes;
    Sizes strides;
    int64_t item = 4;
    size_t memory = 96;
  };
  for (const auto& zip : {Zip(), Zip::large()}) {
    for (const auto& pickle : {ordered_dict(kinds()), dict(kinds())}) {
      MemoryDisk disk;
      auto folder = opened(disk, file_of(whole(pickle), zip));
      CHECK_FALSE(folder.index().marker);
      CHECK(folder.index().values.empty());
      CHECK(folder.index().tensors.size() == kinds().size() - 1);
      for (const auto& [name, offset, sizes, strides, item, memory] : std::vector<Place>{
               {"whole", 0, {4, 6}, {6, 1}},
               {"tied", 0, {4, 6}, {6, 1}},
               {"rows", 6, {2, 6}, {6, 1}},
               {"columns", 2, {4, 3}, {6, 1}},
               {"transposed", 0, {6, 4}, {1, 6}},
               {"steps", 1, {2, 2, 3}, {12, 1, 2}},
               {"parameter", 1, {2}, {1}, 2, 6},
               {"later", 1, {5}, {1}, 1, 6},
               {"bool", 5, {}, {}, 1, 6},
               {"none", 0, {0, 3}, {3, 1}, 1, 0}}) {
        CAPTURE(name);
        const auto& saved = folder.tensor(name);
        CHECK(saved.sizes == sizes);
        CHECK(static_cast<int64_t>(c10::elementSize(saved.dtype)) == item);
        auto box = Box::whole(sizes);
        const auto content = some_bytes(memory);
        CHECK(bytes_of(folder, name, box) == expected(content, box, offset, strides, item));
        for (auto& size : box.sizes) size = (size + 1) / 2;
        for (size_t dim = 0; dim < sizes.size(); ++dim) box.offsets[dim] = sizes[dim] - box.sizes[dim];
        CHECK(bytes_of(folder, name, box) == expected(content, box, offset, strides, item));
      }
      CHECK(folder.tensor("parameter").dtype == c10::ScalarType::BFloat16);
      CHECK(folder.tensor("later").dtype == c10::ScalarType::Float8_e5m2);
      CHECK(folder.tensor("bool").dtype == c10::ScalarType::Bool);
      CHECK(folder.tensor("none").dtype == c10::ScalarType::Char);
    }
  }
}

TEST_CASE("torch file: a reader of some rows reads only their blocks, each once") {
  const int64_t rows = 3 * kBlockBytes / 4096;
  const auto content = some_bytes(static_cast<size_t>(3 * kBlockBytes));
  const auto pickle = dict(
      {{"rows", tensor("ByteStorage", "0", 3 * kBlockBytes, 0, {rows, 4096}, {4096, 1})},
       {"transposed", tensor("ByteStorage", "0", 3 * kBlockBytes, 0, {4096, rows}, {1, 4096})}});
  MemoryDisk inner;
  put(inner, Zip().add("m/data.pkl", whole(pickle)).add("m/data/0", content).finish());
  FaultyDisk disk(inner);
  SavedFolder folder(disk, "m.pt");
  auto before = disk.steps().size();
  CHECK(
      bytes_of(folder, "rows", Box{{rows / 2, 0}, {2, 4096}}) ==
      content.substr(static_cast<size_t>(rows / 2 * 4096), 8192));
  // It opens the file, asks for its size, and reads.
  CHECK(disk.steps().size() == before + 3);
  before = disk.steps().size();
  const Box box{{100, 0}, {50, rows}};
  CHECK(bytes_of(folder, "transposed", box) == expected(content, box, 0, {1, 4096}, 1));
  CHECK(disk.steps().size() <= before + 4);
}

TEST_CASE("torch file: an entry is the state dict, and what lies beside is values") {
  const auto state = ordered_dict({{"w", tensor("FloatStorage", "0", 24, 0, {24}, {1})}});
  const std::string half = std::string("G\x3f\xe0") + std::string(6, '\0');
  const auto content = file_of(whole(dict(
      {{"model", state},
       {"step", number(-3)},
       {"loss", half},
       {"large", std::string("\x8a\x09\x00\x00\x00\x00\x00\x00\x00\x00\x01", 11)},
       {"text", text("caf\xc3\xa9")},
       {"yes", "\x88"},
       {"nothing", "N"},
       {"list", "](" + number(1) + "e"},
       {"arguments", call(global("argparse", "Namespace"), {}) + dict({{"lr", half}}) + "b"},
       {"optimizer", dict({{"state", "}"}})}})));
  MemoryDisk disk;
  const auto folder = opened(disk, content, "model");
  CHECK(folder.index().tensors.size() == 1);
  CHECK(
      folder.index().values ==
      Json::Object{
          {"step", -3}, {"loss", 0.5}, {"large", 18446744073709551616.0}, {"text", "caf\xc3\xa9"}, {"yes", true}});
  check_refused(
      content, "has no entry 'moddel' that is a dictionary. Its entries that are: 'model', 'optimizer'", "moddel");
  check_refused(content, "has no tensors but in its entries 'model', 'optimizer'. Name the one");
  const auto plain = file_of(whole(dict({{"w", tensor("FloatStorage", "0", 24, 0, {24}, {1})}, {"step", number(4)}})));
  CHECK(opened(disk, plain).index().values == Json::Object{{"step", 4}});
}

TEST_CASE("torch file: what is not a plain tensor is refused by its name") {
  const std::string alone = "Save the state dict alone in Python";
  check_tensor_refused(
      call(global("os", "system"), {text("true")}),
      "its 'w.x' is made by 'os.system' in Python, not a plain tensor. " + alone);
  check_tensor_refused(global("os", "system"), "its 'w.x' is 'os.system' of Python");
  check_tensor_refused(tensor("QInt8Storage", "0", 24, 0, {24}, {1}), "its 'w.x' is 'torch.QInt8Storage' of Python");
  check_tensor_refused(
      call(global("torch._utils", "_rebuild_parameter"), {call(global("a", "b"), {})}), "its 'w.x' is made by 'a.b'");
  check_refused(
      file_of(whole(global("__main__", "Net") + ")\x81" + dict({}) + "b")),
      "it is made by '__main__.Net' in Python, not a state dict. " + alone);
  check_refused(file_of(whole(number(1))), "it is a value of another kind, not a state dict");
  check_refused(file_of(whole(tuple({}))), "it is a list or a tuple, not a state dict");
  check_refused(
      file_of(whole(dict({{"program.x", tensor("FloatStorage", "0", 24, 0, {24}, {1})}}))),
      "its tensor 'program.x' cannot be told from what else a checkpoint has");
}

TEST_CASE("torch file: a tensor that does not lie in the file is refused") {
  const auto of = [](int64_t offset, const Sizes& sizes, const Sizes& strides, const std::string& key = "0") {
    return tensor("FloatStorage", key, 24, offset, sizes, strides);
  };
  const int64_t most = INT64_MAX;
  check_tensor_refused(of(0, {25}, {1}), "its tensor 'w.x' has the sizes [25], which do not lie in its memory of 96");
  check_tensor_refused(of(1, {24}, {1}), "do not lie in its memory");
  check_tensor_refused(of(most, {1}, {1}), "do not lie in its memory");
  check_tensor_refused(of(0, {most}, {1}), "do not lie in its memory");
  check_tensor_refused(of(0, {most, most}, {most, most}), "do not lie in its memory");
  check_tensor_refused(of(0, {2, 2}, {23, 1}), "do not lie in its memory");
  check_tensor_refused(of(0, {most, 2}, {0, 0}), "elements of its 'w.x', as of an expanded tensor, share memory");
  check_tensor_refused(of(0, {25}, {0}), "share memory");
  check_tensor_refused(of(-1, {24}, {1}), "has a size, stride or offset that is none");
  check_tensor_refused(of(0, {-1}, {1}), "has a size, stride or offset that is none");
  check_tensor_refused(of(0, {4}, {-1}), "has a size, stride or offset that is none");
  check_tensor_refused(of(0, {4}, {1, 1}), "has not as many strides as sizes");
  check_tensor_refused(of(0, Sizes(65, 1), Sizes(65, 1)), "has sizes or strides that are no list of 64 at most");
  check_tensor_refused(of(0, {4}, {1}, "7"), "it has no 'm/data/7'");
  check_tensor_refused(of(0, {4}, {1}, "../x"), "it has no 'm/data/../x'");
  check_tensor_refused(
      call(global("torch._utils", "_rebuild_tensor_v2"), {number(1)}), "its tensor 'w.x' is not made of 6 values");
  check_tensor_refused(
      call(
          global("torch._utils", "_rebuild_tensor_v2"),
          {number(1), number(0), numbers({1}), numbers({1}), "\x89", "N"}),
      "its tensor 'w.x' has no memory");
  const auto twice = of(0, {4}, {1});
  check_refused(file_of(whole("}" + items({{"a", twice}, {"a", twice}}))), "it has 'a' twice");
  check_refused(file_of(whole("}" + number(1) + twice + "s")), "the name of a tensor is not a text");
}

TEST_CASE("torch file: other formats are told by name") {
  const auto good = file_of(whole(ordered_dict(kinds())));
  check_refused("", "is not a safetensors file");
  check_refused("PK", "is not a safetensors file");
  check_refused(Zip().add("m/data.pkl", whole("}"), 8).finish(), "its 'm/data.pkl' is compressed or encrypted");
  check_refused(Zip().add("data.pkl", whole("}")).add("a/b/data.pkl", "").finish(), "it has no data.pkl");
  check_refused(Zip().add("m/data.pkl", "").add("m/data.pkl", "").finish(), "has 'm/data.pkl' twice");
  check_refused(Zip().finish(), "is not a safetensors file");
  for (size_t bytes = 9; bytes < good.size(); bytes += 7) check_refused(good.substr(0, bytes), "m.pt");
  MemoryDisk disk;
  CHECK(opened(disk, file_of(whole("}"))).index().tensors.empty());
}

TEST_CASE("torch file: pickles that are none, nested deeply or in circles are errors or harmless") {
  const auto refused = [](const std::string& pickle, const std::string& why) { check_refused(file_of(pickle), why); };
  refused("", "it ends");
  refused(whole("").substr(0, 2), "it ends");
  refused(whole(""), "an object is missing");
  refused(std::string("\x80\x06}."), "it has the protocol 6");
  refused(whole("t"), "a mark is missing");
  refused(whole("(N(0t"), "an object is missing");
  refused(whole("h\x05"), "it recalls the object 5, which it did not store");
  refused(whole("}(Nu"), "a key has no value");
  refused(whole("](NNu"), "something that is no dictionary has keys");
  refused(whole("cos\nsystem"), "a line does not end");
  refused(
      whole("X\xff\xff\xff\x7f"
            "abc"),
      "should go on for 2147483647 bytes");
  refused(whole(std::string("\x8d") + std::string(8, '\xff')), "should go on for 18446744073709551615 bytes");
  refused(whole(text("\xff")), "is not UTF-8");
  refused(whole("\x97"), "it has the operation 151");
  MemoryDisk disk;
  const auto put_in = [&](const std::string& value) {
    return opened(disk, file_of(whole("}" + text("a") + value + "s"))).index().tensors.size();
  };
  CHECK(put_in(std::string(1'000'000, ']') + std::string(999'999, 'a')) == 0);
  CHECK(
      put_in("]q\x01h\x01"
             "a") == 0);
  // A place in memory that is as large as numbers are.
  CHECK(put_in("Nr\xff\xff\xff\xff") == 0);
  // A parameter of itself.
  refused(
      whole(
          "}" + text("a") + global("torch._utils", "_rebuild_parameter") +
          "]q\x01R"
          "q\x02"
          "0h\x01h\x02"
          "a0h\x02s"),
      "not a plain tensor");
  refused(whole(std::string(10'000'001, 'N')), "it has more than 10000000 operations");
}

TEST_CASE("torch file: one that was tampered with is an error or harmless") {
  const auto good = file_of(whole(ordered_dict(kinds())));
  std::mt19937 random(20261127);
  MemoryDisk disk;
  const auto rounds = by_form(30'000, 3'000'000);
  int read_well = 0;
  for (int round = 0; round < rounds; ++round) {
    auto content = good;
    for (auto changes = 1 + random() % 3; changes > 0; --changes) {
      const auto at = random() % content.size();
      const auto length = std::min(content.size() - at, random() % 10);
      switch (random() % 5) {
        case 0:
          content[at] = static_cast<char>(random());
          break;
        case 1:
          content.erase(at, length);
          break;
        case 2:
          content.insert(at, content.substr(random() % content.size(), length));
          break;
        case 3:
          content.replace(at, length, std::string(length, random() % 2 == 0 ? '\xff' : '\0'));
          break;
        default:
          content.replace(at, length, good.substr(random() % good.size(), length));
      }
    }
    try {
      auto folder = opened(disk, content);
      for (const auto& [name, tensor] : folder.index().tensors) {
        const auto whole_box = Box::whole(tensor.sizes);
        // What is read lies in the file.
        REQUIRE(
            whole_box.numel() * static_cast<int64_t>(c10::elementSize(tensor.dtype)) <=
            static_cast<int64_t>(content.size()));
        bytes_of(folder, name);
      }
      ++read_well;
    } catch (const Error& error) {
      if (std::string(error.what()).find("m.pt") == std::string::npos) FAIL(error.what());
    }
  }
  // A change of a tensor's values, for example, leaves a good file.
  CHECK(read_well > rounds / 100);
  CHECK(read_well < rounds / 2);
}
