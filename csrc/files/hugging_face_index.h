#pragma once

#include "files/disk.h"
#include "files/json.h"

#include <cstdint>
#include <map>
#include <string>

namespace shardwise::files {

/// Reads a model.safetensors.index.json: the file of each tensor, by the tensor's name.
/// Raises Error where it is not what Hugging Face's libraries write, and for a file that does not lie in the folder.
SHARDWISE_API std::map<std::string, std::string> read_hugging_face_index(Disk& disk, const std::string& path);

/// The text of one: the file of each tensor, and how many bytes all of them have.
std::string hugging_face_index(Json::Object files_of_tensors, int64_t bytes);

} // namespace shardwise::files
