#include "files/hugging_face_index.h"

#include "files/file_names.h"
#include "files/header_keys.h"
#include "files/in_quotes.h"

#include <c10/util/StringUtil.h>

#include <utility>

namespace shardwise::files {
namespace {

constexpr const char* kWeightMap = "weight_map";
/// That of a million tensors is shorter.
constexpr int64_t kLongestIndex = 100'000'000;

} // namespace

std::map<std::string, std::string> read_hugging_face_index(Disk& disk, const std::string& path) {
  const auto json = parse_json(read_text(disk, path, kLongestIndex), path);
  const auto* places = json.find(kWeightMap);
  const auto* members = places == nullptr ? nullptr : places->as<Json::Object>();
  if (members == nullptr)
    throw Error(c10::str("shardwise: ", path, " is broken: it has no object ", kWeightMap, ". ", kRemedy));
  std::map<std::string, std::string> result;
  for (const auto& [name, value] : *members) {
    const auto* file = value.as<std::string>();
    if (file == nullptr || !is_tensor_file(*file)) {
      throw Error(c10::str(
          "shardwise: ", path, " is broken: it says that ", in_quotes(name), " is in ",
          file == nullptr ? "what is no text" : in_quotes(*file), "; it must be in a file of this folder that ends in ",
          kTensorFileEnd, ". ", kRemedy));
    }
    result.emplace(name, *file);
  }
  return result;
}

std::string hugging_face_index(Json::Object files_of_tensors, int64_t bytes) {
  return json_text(
      Json::Object{{"metadata", Json::Object{{"total_size", bytes}}}, {kWeightMap, std::move(files_of_tensors)}});
}

} // namespace shardwise::files
