#include "files/tensor_header.h"

#include "files/dtypes.h"
#include "files/header_keys.h"
#include "files/in_quotes.h"
#include "files/json.h"

#include <shardwise/error.h>

#include <c10/util/StringUtil.h>

#include <algorithm>
#include <limits>
#include <set>

namespace shardwise::files {
namespace {

int64_t item_bytes(const TensorEntry& entry) {
  return static_cast<int64_t>(c10::elementSize(entry.dtype));
}

/// The bytes of its box.
/// Raises ValueError where it is no box.
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
        " is no piece of a tensor; offsets and sizes must be 0 or more, one of each for a dimension, ", kMostDimensions,
        " at most."));
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

Json list_of(const Sizes& sizes) {
  return Json::List(sizes.begin(), sizes.end());
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
  return list_of(sizes);
}

} // namespace

std::string make_header(std::vector<TensorEntry>& tensors, FileKind kind) {
  check_names(tensors);
  set_ranges(tensors);
  Json::Object boxes;
  Json::Object header{{kTexts, {}}};
  for (const auto& entry : tensors) {
    boxes.push_back({entry.name, Json::Object{{kOffsets, list_of(entry.box.offsets)}}});
    header.push_back(
        {entry.name, Json::Object{
                         {kDtype, dtype_name(entry.dtype, entry.name)},
                         {kShape, shape_of(entry)},
                         {kRange, Json::List{entry.begin, entry.end}}}});
  }
  Json::Object texts{{kFormat, kFormatValue}};
  if (kind == FileKind::pieces) {
    texts.push_back({kDcpVersion, kDcpVersionValue});
    texts.push_back({kBoxes, json_text(std::move(boxes))});
    texts.push_back({kWriter, kWriterValue});
  }
  header[0].value = std::move(texts);
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
  uint64_t length = 0;
  for (size_t i = first_bytes.size(); i-- > 0;) length = length << 8U | static_cast<unsigned char>(first_bytes[i]);
  const auto most = std::min(file_bytes - kLengthBytes, kLongestHeader);
  if (static_cast<int64_t>(first_bytes.size()) != kLengthBytes || most < 2 || length < 2 ||
      length > static_cast<uint64_t>(most)) {
    throw Error(c10::str(
        "shardwise: ", file, " is no file of safetensors, or a broken one: its ", file_bytes,
        " bytes begin with a length of ", length, " for the header, which must be at least 2, at most ", kLongestHeader,
        ", and end with the file at the latest. ", kRemedy));
  }
  return static_cast<int64_t>(length);
}

} // namespace shardwise::files
