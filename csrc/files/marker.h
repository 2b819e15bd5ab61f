#pragma once

#include "files/checksum.h"
#include "files/disk.h"
#include "files/json.h"

#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace shardwise::files {

/// The file that is written last: a folder that has it is a complete checkpoint.
constexpr const char* kMarkerName = "shardwise.json";
/// Its name while it is written.
constexpr const char* kNewMarkerName = "shardwise.json.new";
/// The format that this version writes, and the only one that it reads.
constexpr int64_t kFormatVersion = 1;

/// What shardwise.json says of a checkpoint.
struct Marker {
  /// Which save wrote it: its owner.
  std::string save;
  /// How many ranks wrote it.
  int64_t world = 1;
  /// The program's own values, by name: numbers, also infinite ones, texts, truth values, and lists of these.
  Json::Object values;
  std::vector<FileRecord> files;

  bool operator==(const Marker&) const = default;
};

/// The text of the file, with a checksum of itself.
/// Raises ValueError for values of other kinds.
SHARDWISE_API std::string marker_text(const Marker& marker);

/// Reads that text. `path` is its name in errors.
/// Raises Error for another version of the format, and for a text that is not what was written.
SHARDWISE_API Marker parse_marker(std::string_view text, const std::string& path);

/// The marker of a folder; nothing if it has none.
SHARDWISE_API std::optional<Marker> read_marker(Disk& disk, const std::string& folder);

/// What is wrong with the files of a complete checkpoint, as far as their names and sizes tell: one that is missing, or
/// cut off, or one of safetensors too many; "" if nothing is. Other files may lie beside them.
SHARDWISE_API std::string files_error(Disk& disk, const std::string& folder, const Marker& marker);

/// The program's own values as the marker has them. JSON has no numbers that are infinite or none: they become an
/// object of one text, {"number": "inf"}, which no value of a program is.
/// Raises ValueError, with the value's name, for null, an object, and a list of these.
Json::Object json_of_values(const Json::Object& values);

} // namespace shardwise::files
