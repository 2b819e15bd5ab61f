#include "files/dtypes.h"
#include "files/header_keys.h"
#include "files/in_quotes.h"
#include "files/json.h"
#include "files/tensor_header.h"

#include <shardwise/error.h>

#include <c10/util/StringUtil.h>

#include <algorithm>
#include <tuple>
#include <unordered_map>

namespace shardwise::files {
namespace {

class HeaderParser {
 public:
  HeaderParser(int64_t data_bytes, const std::string& file) : data_bytes_(data_bytes), file_(file) {}

  TensorHeader parse(std::string_view text) {
    const auto json = parse_json(text, "the header of " + file_);
    const auto* members = json.as<Json::Object>();
    // A blank before it would be JSON, but safetensors does not allow one.
    if (members == nullptr || text.front() != '{') fail("its header is no JSON object");
    for (const auto& [name, value] : *members) {
      if (name != kTexts) header_.tensors.push_back(entry(name, value));
    }
    check_ranges();
    if (const auto* texts = json.find(kTexts)) read_texts(*texts);
    return std::move(header_);
  }

 private:
  [[noreturn]] void fail(const std::string& what) const {
    throw Error(c10::str("shardwise: ", file_, " is no file of safetensors, or a broken one: ", what, ". ", kRemedy));
  }
  [[noreturn]] void fail_at(const std::string& tensor, const std::string& what) const {
    fail(c10::str("its tensor ", in_quotes(tensor), " ", what));
  }

  /// A list of numbers that are 0 or more.
  Sizes numbers(const std::string& tensor, const char* key, const Json* json) const {
    const auto* list = json == nullptr ? nullptr : json->as<Json::List>();
    if (list == nullptr) fail_at(tensor, c10::str("has no list ", key));
    if (list->size() > kMostDimensions)
      fail_at(tensor, c10::str("has ", list->size(), " numbers in ", key, ", more than ", kMostDimensions));
    Sizes result;
    for (const auto& each : *list) {
      const auto* number = each.as<int64_t>();
      if (number == nullptr || *number < 0) fail_at(tensor, c10::str("has an entry of ", key, " that is no size"));
      result.push_back(*number);
    }
    return result;
  }

  TensorEntry entry(const std::string& name, const Json& json) const {
    const auto* members = json.as<Json::Object>();
    if (members == nullptr || members->size() != 3)
      fail_at(name, c10::str("is not described by ", kDtype, ", ", kShape, " and ", kRange, " alone"));
    const auto* named = json.find(kDtype);
    const auto* word = named == nullptr ? nullptr : named->as<std::string>();
    if (word == nullptr) fail_at(name, c10::str("has no text ", kDtype));
    const auto dtype = dtype_of(*word);
    auto sizes = numbers(name, kShape, json.find(kShape));
    TensorEntry result{.name = name, .dtype = dtype.value_or(c10::ScalarType::Undefined)};
    const auto range = numbers(name, kRange, json.find(kRange));
    if (range.size() != 2 || range[0] > range[1]) fail_at(name, c10::str("has ", kRange, " that are no range"));
    std::tie(result.begin, result.end) = std::pair(range[0], range[1]);
    if (!dtype) {
      result.unknown_dtype = *word;
      result.box = Box::whole(sizes);
      return result;
    }
    if (const auto packed = packed_elements(*dtype); packed > 1) {
      if (sizes.empty() || sizes.back() % packed != 0)
        fail_at(name, c10::str("has the sizes ", text_of(sizes), ", but elements of ", *word, " come in pairs"));
      sizes.back() /= packed;
    }
    result.box = Box::whole(sizes);
    const auto numel = product_of(result.box.sizes);
    int64_t bytes = 0;
    if (!numel || __builtin_mul_overflow(*numel, static_cast<int64_t>(c10::elementSize(*dtype)), &bytes))
      fail_at(name, c10::str("has the sizes ", text_of(result.box.sizes), ", which are larger than any file"));
    if (bytes != result.end - result.begin) {
      fail_at(
          name, c10::str(
                    "has ", result.end - result.begin, " bytes of data, but its sizes ", text_of(result.box.sizes),
                    " in ", *word, " are ", bytes));
    }
    return result;
  }

  void check_ranges() {
    auto& tensors = header_.tensors;
    std::sort(tensors.begin(), tensors.end(), [](const auto& one, const auto& other) {
      return std::tie(one.begin, one.end, one.name) < std::tie(other.begin, other.end, other.name);
    });
    int64_t end = 0;
    for (const auto& entry : tensors) {
      if (entry.begin < end)
        fail_at(entry.name, c10::str("begins at byte ", entry.begin, " of the data, inside of another one"));
      if (entry.begin > end)
        fail_at(entry.name, c10::str("begins at byte ", entry.begin, " of the data, and none has those from ", end));
      if (entry.end > data_bytes_)
        fail_at(entry.name, c10::str("ends at byte ", entry.end, " of the data, of which there are ", data_bytes_));
      end = entry.end;
    }
    if (end != data_bytes_)
      fail(c10::str("its tensors have ", end, " bytes of data, but it has ", data_bytes_, ", or is cut off"));
  }

  void read_texts(const Json& json) {
    const auto* members = json.as<Json::Object>();
    if (members == nullptr) fail(c10::str("its ", kTexts, " are no object"));
    for (const auto& [name, value] : *members) {
      const auto* text = value.as<std::string>();
      if (text == nullptr) fail(c10::str("its ", kTexts, " have ", in_quotes(name), ", which is no text"));
      header_.texts[name] = *text;
    }
    const auto boxes = header_.texts.find(kBoxes);
    if (boxes != header_.texts.end()) read_boxes(parse_json(boxes->second, c10::str("the ", kBoxes, " of ", file_)));
  }

  void read_boxes(const Json& json) {
    const auto* members = json.as<Json::Object>();
    if (members == nullptr) fail(c10::str("its ", kBoxes, " are no object"));
    std::unordered_map<std::string_view, const Json*> by_name;
    for (const auto& [name, value] : *members) by_name.emplace(name, &value);
    for (auto& entry : header_.tensors) {
      const auto found = by_name.find(entry.name);
      if (found == by_name.end()) fail_at(entry.name, c10::str("is not in its ", kBoxes));
      entry.box.offsets = numbers(entry.name, kOffsets, found->second->find(kOffsets));
      const auto& [offsets, sizes] = entry.box;
      if (offsets.size() != sizes.size())
        fail_at(entry.name, c10::str("has the sizes ", text_of(sizes), ", but ", kOffsets, " ", text_of(offsets)));
      for (size_t dim = 0; dim < sizes.size(); ++dim) {
        int64_t end = 0;
        if (__builtin_add_overflow(offsets[dim], sizes[dim], &end))
          fail_at(entry.name, c10::str("has ", kOffsets, " ", text_of(offsets), ", which no tensor has"));
      }
    }
    if (members->size() != header_.tensors.size())
      fail(c10::str("its ", kBoxes, " name tensors that it does not have"));
    header_.has_boxes = true;
  }

  int64_t data_bytes_;
  const std::string& file_;
  TensorHeader header_;
};

} // namespace

TensorHeader parse_header(std::string_view header, int64_t data_bytes, const std::string& file) {
  return HeaderParser(data_bytes, file).parse(header);
}

} // namespace shardwise::files
