#include "files/marker.h"

#include "files/in_quotes.h"
#include "files/names.h"
#include "files/tensor_header.h"

#include <shardwise/error.h>

#include <c10/util/StringUtil.h>

#include <algorithm>
#include <cmath>
#include <set>

namespace shardwise::files {
namespace {

/// A checkpoint of 60 TB has such a marker.
constexpr int64_t kLongestMarker = int64_t{256} * 1024 * 1024;

// The text is {"version": 1, "checksum": "...", "content": {...}}; the checksum is that of the content's text.
constexpr std::string_view kVersionKey = "{\"version\": ";
constexpr std::string_view kChecksumKey = ", \"checksum\": \"";
constexpr std::string_view kContentKey = "\",\n\"content\": ";
constexpr std::string_view kEnd = "}\n";

Json::Object json_of(const FileRecord& file) {
  std::string blocks;
  for (const auto block : file.blocks) blocks += checksum_text(block);
  return {
      {"name", file.name},
      {"bytes", file.bytes},
      {"header_bytes", file.header_bytes},
      {"header_checksum", checksum_text(file.header_checksum)},
      {"block_checksums", std::move(blocks)}};
}

constexpr const char* kNumber = "number";

Json json_of_value(const Json& value, const std::string& name) {
  if (const auto* number = value.as<double>(); number != nullptr && !std::isfinite(*number))
    return Json::Object{{kNumber, std::isnan(*number) ? "nan" : *number > 0 ? "inf" : "-inf"}};
  if (const auto* list = value.as<Json::List>()) {
    Json::List items;
    for (const auto& item : *list) items.push_back(json_of_value(item, name));
    return items;
  }
  if (value.as<std::nullptr_t>() != nullptr || value.as<Json::Object>() != nullptr) {
    throw ValueError(c10::str(
        "shardwise: the value ", in_quotes(name),
        " cannot be saved: it must be a number, a text, a truth value, or a list of these."));
  }
  return value;
}

/// The value again.
Json value_of(const Json& json, const std::string& path) {
  if (const auto* list = json.as<Json::List>()) {
    Json::List items;
    for (const auto& item : *list) items.push_back(value_of(item, path));
    return items;
  }
  if (json.as<Json::Object>() == nullptr && json.as<std::nullptr_t>() == nullptr) return json;
  const auto* word = json.find(kNumber) == nullptr ? nullptr : json.find(kNumber)->as<std::string>();
  if (word != nullptr && (*word == "inf" || *word == "-inf" || *word == "nan")) return std::stod(*word);
  throw Error(c10::str("shardwise: ", path, " has a value that no program saved. ", kRemedy));
}

class MarkerParser {
 public:
  explicit MarkerParser(const std::string& path) : path_(path) {}

  Marker parse(std::string_view text) const {
    const auto content = content_of(text);
    const auto json = parse_json(content, path_);
    Marker marker;
    marker.save = text_in(json, "save");
    marker.world = number(json, "world");
    if (number(json, "block_bytes") != kBlockBytes) fail("its blocks are not those of this version");
    const auto* values = member(json, "values").as<Json::Object>();
    if (values == nullptr) fail("its values are not an object");
    for (const auto& [name, value] : *values) marker.values.push_back({name, value_of(value, path_)});
    const auto* files = member(json, "files").as<Json::List>();
    if (files == nullptr) fail("its files are not a list");
    std::set<std::string_view> names;
    for (const auto& file : *files) marker.files.push_back(record(file));
    for (const auto& file : marker.files) {
      if (!names.insert(file.name).second) fail(c10::str("it names ", in_quotes(file.name), " twice"));
    }
    return marker;
  }

 private:
  [[noreturn]] void fail(const std::string& why) const {
    throw Error(c10::str("shardwise: ", path_, " is not what was saved: ", why, ". ", kRemedy));
  }

  /// Takes this from the beginning.
  void skip(std::string_view& text, std::string_view expected) const {
    if (!text.starts_with(expected)) fail("it does not begin as it should");
    text.remove_prefix(expected.size());
  }

  std::string_view content_of(std::string_view text) const {
    skip(text, kVersionKey);
    const auto digits = text.substr(0, std::min(text.find(','), size_t{20}));
    if (digits != std::to_string(kFormatVersion)) {
      throw Error(c10::str(
          "shardwise: the checkpoint of ", path_, " has version ", in_quotes(digits),
          " of the format; this version of shardwise reads version ", kFormatVersion,
          ". Load it with the version of shardwise that saved it."));
    }
    text.remove_prefix(digits.size());
    skip(text, kChecksumKey);
    const auto expected = parse_checksum(text.substr(0, 16));
    text.remove_prefix(std::min<size_t>(16, text.size()));
    skip(text, kContentKey);
    if (!text.ends_with(kEnd)) fail("it does not end as it should");
    text.remove_suffix(kEnd.size());
    if (expected != checksum(text)) fail("its checksum is another one");
    return text;
  }

  const Json& member(const Json& json, const char* name) const {
    const auto* found = json.find(name);
    if (found == nullptr) fail(c10::str("it has no ", name));
    return *found;
  }
  int64_t number(const Json& json, const char* name) const {
    const auto* number = member(json, name).as<int64_t>();
    if (number == nullptr || *number < 0) fail(c10::str("its ", name, " is not a number of 0 or more"));
    return *number;
  }
  const std::string& text_in(const Json& json, const char* name) const {
    const auto* text = member(json, name).as<std::string>();
    if (text == nullptr) fail(c10::str("its ", name, " is not a string"));
    return *text;
  }
  uint64_t checksum_in(std::string_view text) const {
    const auto found = parse_checksum(text);
    if (!found) fail(c10::str(in_quotes(text), " is not a checksum"));
    return *found;
  }

  FileRecord record(const Json& json) const {
    FileRecord file;
    file.name = text_in(json, "name");
    if (!is_tensor_file(file.name)) fail(c10::str(in_quotes(file.name), " is not a file of a checkpoint"));
    file.bytes = number(json, "bytes");
    file.header_bytes = number(json, "header_bytes");
    file.header_checksum = checksum_in(text_in(json, "header_checksum"));
    const std::string_view blocks = text_in(json, "block_checksums");
    const auto data_bytes = file.bytes - file.header_bytes;
    const auto count = data_bytes / kBlockBytes + (data_bytes % kBlockBytes != 0 ? 1 : 0);
    if (data_bytes < 0 || blocks.size() != 16 * static_cast<size_t>(count))
      fail(c10::str("its checksums of ", in_quotes(file.name), " are not as many as the file has blocks"));
    for (size_t at = 0; at < blocks.size(); at += 16) file.blocks.push_back(checksum_in(blocks.substr(at, 16)));
    return file;
  }

  const std::string& path_;
};

} // namespace

std::string marker_text(const Marker& marker) {
  Json::List files;
  for (const auto& file : marker.files) files.emplace_back(json_of(file));
  const auto content = json_text(Json::Object{
      {"save", marker.save},
      {"world", marker.world},
      {"values", json_of_values(marker.values)},
      {"block_bytes", kBlockBytes},
      {"files", std::move(files)}});
  return c10::str(
      kVersionKey, kFormatVersion, kChecksumKey, checksum_text(checksum(content)), kContentKey, content, kEnd);
}

Marker parse_marker(std::string_view text, const std::string& path) {
  return MarkerParser(path).parse(text);
}

std::optional<Marker> read_marker(Disk& disk, const std::string& folder) {
  const auto path = folder + "/" + kMarkerName;
  if (!disk.kind(path)) return {};
  return parse_marker(read_text(disk, path, kLongestMarker), path);
}

std::string files_error(Disk& disk, const std::string& folder, const Marker& marker) {
  const auto present = disk.list(folder);
  std::set<std::string_view> known;
  for (const auto& file : marker.files) {
    known.insert(file.name);
    const auto path = folder + "/" + file.name;
    if (!std::binary_search(present.begin(), present.end(), file.name)) return c10::str(path, " is missing");
    const auto bytes = disk.open(path)->size();
    if (bytes != file.bytes) return c10::str(path, " has ", bytes, " bytes, but ", file.bytes, " were saved");
  }
  for (const auto& name : present) {
    if (name == kHuggingFaceIndex || (is_tensor_file(name) && !known.contains(name)))
      return c10::str(folder, "/", name, " is there, but was not saved with this checkpoint");
  }
  return "";
}

Json::Object json_of_values(const Json::Object& values) {
  Json::Object result;
  for (const auto& [name, value] : values) result.push_back({name, json_of_value(value, name)});
  return result;
}

} // namespace shardwise::files
