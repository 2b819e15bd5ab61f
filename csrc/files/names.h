#pragma once

#include <shardwise/detail/export.h>

#include <cstdint>
#include <string>
#include <string_view>

namespace shardwise::files {

/// The prefixes of an optimizer's state and of the program's own tensors. The module's tensors have no prefix.
constexpr const char* kOptimizer = "optimizer.";
constexpr const char* kProgram = "program.";
/// What the names of an optimizer's tensors begin with.
constexpr const char* kOptimizerState = "optimizer.state.";
constexpr const char* kOptimizerOptions = "optimizer.param_groups.";

constexpr const char* kTensorFileEnd = ".safetensors";
/// The file of a checkpoint of Hugging Face's that says which of its files has a tensor.
constexpr const char* kHuggingFaceIndex = "model.safetensors.index.json";
/// The same of one whose files are of torch.save(), and what such a file is called where there is one alone.
constexpr const char* kTorchIndex = "pytorch_model.bin.index.json";
constexpr const char* kTorchFile = "pytorch_model.bin";
constexpr const char* kTorchFileEnd = ".bin";
/// The object that has them there, by the tensors' names.
constexpr const char* kWeightMap = "weight_map";

/// Whether this names a file in a folder, not one elsewhere: no slash, no NUL, neither "." nor "..".
SHARDWISE_API bool is_plain_name(std::string_view name);
/// The same, of a file that ends so.
SHARDWISE_API bool is_tensor_file(std::string_view name, std::string_view end = kTensorFileEnd);

/// The name of one of a rank's files, as torch's HuggingFaceStorageWriter gives it: both numbers begin with 1.
SHARDWISE_API std::string tensor_file_name(int64_t shard, int64_t file, int64_t files);
/// The name of a file of a model that is no checkpoint of ranks, as Hugging Face's libraries give it.
SHARDWISE_API std::string whole_file_name(int64_t file, int64_t files);

} // namespace shardwise::files
