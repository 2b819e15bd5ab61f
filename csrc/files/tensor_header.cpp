#include "files/tensor_header.h"

#include "files/in_quotes.h"
#include "files/json.h"
#include "files/little_endian.h"

#include <shardwise/error.h>

#include <c10/util/StringUtil.h>

#include <algorithm>
#include <set>
#include <tuple>
#include <unordered_map>
#include <utility>

namespace shardwise::files {
namespace {

int64_t item_bytes(const TensorEntry& entry) {
  return static_cast<int64_t>(c10::elementSize(entry.dtype));
}

/// The bytes of its box.
/// Raises ValueError if it is no box.
int64_t bytes_to_write(const TensorEntry& entry) {
  const auto& [offsets, sizes] = entry.box;
  bool good = offsets.size() == sizes.size() && sizes.size() <= kMostDimensions;
  for (size_t dim = 0; good && dim < sizes.size(); ++dim) {
    int64_t end = 0;
    good = offsets[dim] >= 0 && sizes[dim] >= 0 && !__builtin_add_overflow(offsets[dim], sizes[dim], &end);
  }
  const auto numel = good ? product_of(sizes) : std::nullopt;
  int64_t bytes = 0;
  if (!numel || __builtin_mul_overflow(*numel, item_bytes(entry), &bytes)) {
    throw ValueError(c10::str(
        "shardwise: ", in_quotes(entry.name), " cannot be saved: ", text_of(entry.box),
        " is not a piece of a tensor; offsets and sizes must be 0 or more, one of each for a dimension, ",
        kMostDimensions, " at most."));
  }
  return bytes;
}

void check_names(const std::vector<TensorEntry>& tensors) {
  std::set<std::string_view> names;
  for (const auto& entry : tensors) {
    if (entry.name.empty() || entry.name == kTexts || !is_utf8(entry.name)) {
      throw ValueError(c10::str(
          "shardwise: a tensor cannot be saved as ", in_quotes(entry.name), "; a name is a text in UTF-8 other than '",
          kTexts, "'."));
    }
    if (!names.insert(entry.name).second) {
      throw ValueError(c10::str(
          "shardwise: ", in_quotes(entry.name),
          " would come twice in one file; each piece of a tensor must be in a file of its own."));
    }
  }
}

/// Largest elements first: then each tensor is aligned to its elements, for the data is aligned to 8 bytes.
void set_ranges(std::vector<TensorEntry>& tensors) {
  std::stable_sort(tensors.begin(), tensors.end(), [](const auto& one, const auto& other) {
    return item_bytes(one) > item_bytes(other);
  });
  int64_t end = 0;
  for (auto& entry : tensors) {
    entry.begin = end;
    if (__builtin_add_overflow(entry.begin, bytes_to_write(entry), &entry.end))
      throw ValueError(c10::str("shardwise: ", in_quotes(entry.name), " makes its file larger than any can be."));
    end = entry.end;
  }
}

/// As safetensors counts elements.
Json shape_of(const TensorEntry& entry) {
  auto sizes = entry.box.sizes;
  const auto packed = packed_elements(entry.dtype);
  if (packed > 1 && sizes.empty()) {
    throw ValueError(c10::str(
        "shardwise: ", in_quotes(entry.name), " cannot be saved: it has no dimensions, and ",
        c10::toString(entry.dtype), " is ", packed, " elements along the last one. Give it one with reshape({1})."));
  }
  if (packed > 1) sizes.back() *= packed;
  return sizes;
}

class HeaderParser {
 public:
  HeaderParser(int64_t data_bytes, const std::string& file) : data_bytes_(data_bytes), file_(file) {}

  TensorHeader parse(std::string_view text) {
    const auto json = parse_json(text, "the header of " + file_);
    const auto* members = json.as<Json::Object>();
    // A blank before it would be JSON, but safetensors does not allow one.
    if (members == nullptr || text.front() != '{') fail("its header is not a JSON object");
    for (const auto& [name, value] : *members) {
      if (name != kTexts) header_.tensors.push_back(entry(name, value));
    }
    check_ranges();
    if (const auto* texts = json.find(kTexts)) read_texts(*texts);
    return std::move(header_);
  }

 private:
  [[noreturn]] void fail(const std::string& what) const {
    throw Error(c10::str("shardwise: ", file_, " is not a safetensors file, or is broken: ", what, ". ", kRemedy));
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
      if (number == nullptr || *number < 0) fail_at(tensor, c10::str("has an entry of ", key, " that is not a size"));
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
    if (range.size() != 2 || range[0] > range[1]) fail_at(name, c10::str("has ", kRange, " that are not a range"));
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
    if (members == nullptr) fail(c10::str("its ", kTexts, " is not an object"));
    for (const auto& [name, value] : *members) {
      const auto* text = value.as<std::string>();
      if (text == nullptr) fail(c10::str("its ", kTexts, " has ", in_quotes(name), ", which is not a string"));
      header_.texts[name] = *text;
    }
    const auto boxes = header_.texts.find(kBoxes);
    if (boxes != header_.texts.end()) read_boxes(parse_json(boxes->second, c10::str("the ", kBoxes, " of ", file_)));
  }

  void read_boxes(const Json& json) {
    const auto* members = json.as<Json::Object>();
    if (members == nullptr) fail(c10::str("its ", kBoxes, " is not an object"));
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
  }

  int64_t data_bytes_;
  const std::string& file_;
  TensorHeader header_;
};

} // namespace

std::string dtype_name(c10::ScalarType dtype, const std::string& parameter) {
  for (const auto& [name, named] : kNamedDtypes) {
    if (named == dtype) return name;
  }
  throw ValueError(c10::str(
      "shardwise: ", in_quotes(parameter), " cannot be saved: safetensors files have no dtype ", c10::toString(dtype),
      ". Convert it, or leave it out."));
}

std::optional<c10::ScalarType> dtype_of(std::string_view name) {
  for (const auto& [known, dtype] : kNamedDtypes) {
    if (name == known) return dtype;
  }
  return {};
}

std::string make_header(std::vector<TensorEntry>& tensors, FileKind kind) {
  check_names(tensors);
  set_ranges(tensors);
  Json::Object boxes;
  Json::Object header{{kTexts, {}}};
  for (const auto& entry : tensors) {
    boxes.push_back({entry.name, Json::Object{{kOffsets, entry.box.offsets}}});
    header.push_back(
        {entry.name, Json::Object{
                         {kDtype, dtype_name(entry.dtype, entry.name)},
                         {kShape, shape_of(entry)},
                         {kRange, Json::List{entry.begin, entry.end}}}});
  }
  Json::Object texts{{"format", "pt"}};
  if (kind == FileKind::pieces) {
    texts.push_back({"DCP_VERSION", "1.0"});
    texts.push_back({kBoxes, json_text(std::move(boxes))});
    texts.push_back({kWriter, "shardwise"});
  }
  header[0].second = std::move(texts);
  auto text = json_text(std::move(header));
  text.append((kLengthBytes - text.size() % kLengthBytes) % kLengthBytes, ' ');
  if (text.size() > static_cast<size_t>(kLongestHeader)) {
    throw ValueError(c10::str(
        "shardwise: the header of a file with ", tensors.size(), " tensors has ", text.size(), " bytes; readers take ",
        kLongestHeader, ". Spread them over more files."));
  }
  std::string length(kLengthBytes, '\0');
  for (size_t i = 0; i < length.size(); ++i) length[i] = static_cast<char>(text.size() >> (8 * i) & 255U);
  return length + text;
}

int64_t header_length(std::string_view first_bytes, int64_t file_bytes, const std::string& file) {
  const auto length = little_endian(first_bytes);
  const auto most = std::min(file_bytes - kLengthBytes, kLongestHeader);
  if (static_cast<int64_t>(first_bytes.size()) != kLengthBytes || most < 2 || length < 2 ||
      length > static_cast<uint64_t>(most)) {
    throw Error(c10::str(
        "shardwise: ", file, " is not a safetensors file, or is broken: its ", file_bytes,
        " bytes begin with a length of ", length, " for the header, which must be at least 2, at most ", kLongestHeader,
        ", and end with the file at the latest. ", kRemedy));
  }
  return static_cast<int64_t>(length);
}

TensorHeader parse_header(std::string_view header, int64_t data_bytes, const std::string& file) {
  return HeaderParser(data_bytes, file).parse(header);
}

} // namespace shardwise::files
