#pragma once

#include "files/box.h"

#include <shardwise/detail/export.h>

#include <c10/core/ScalarType.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace shardwise::files {

/// The dtypes of safetensors, by their names there.
inline constexpr auto kNamedDtypes = std::to_array<std::pair<const char*, c10::ScalarType>>({
    {"F64", c10::ScalarType::Double},
    {"F32", c10::ScalarType::Float},
    {"F16", c10::ScalarType::Half},
    {"BF16", c10::ScalarType::BFloat16},
    {"I64", c10::ScalarType::Long},
    {"I32", c10::ScalarType::Int},
    {"I16", c10::ScalarType::Short},
    {"I8", c10::ScalarType::Char},
    {"U64", c10::ScalarType::UInt64},
    {"U32", c10::ScalarType::UInt32},
    {"U16", c10::ScalarType::UInt16},
    {"U8", c10::ScalarType::Byte},
    {"BOOL", c10::ScalarType::Bool},
    {"F8_E4M3", c10::ScalarType::Float8_e4m3fn},
    {"F8_E4M3FNUZ", c10::ScalarType::Float8_e4m3fnuz},
    {"F8_E5M2", c10::ScalarType::Float8_e5m2},
    {"F8_E5M2FNUZ", c10::ScalarType::Float8_e5m2fnuz},
    {"F8_E8M0", c10::ScalarType::Float8_e8m0fnu},
    {"F4", c10::ScalarType::Float4_e2m1fn_x2},
    {"C64", c10::ScalarType::ComplexFloat},
});

/// The name that safetensors has for a dtype, such as F32.
/// Raises ValueError, with the parameter's name, for a dtype that it has none for.
SHARDWISE_API std::string dtype_name(c10::ScalarType dtype, const std::string& parameter);

/// The dtype of this name; nothing if torch has none.
SHARDWISE_API std::optional<c10::ScalarType> dtype_of(std::string_view name);

/// How many elements of safetensors, along the last dimension, are one of torch's.
constexpr int64_t packed_elements(c10::ScalarType dtype) {
  return dtype == c10::ScalarType::Float4_e2m1fn_x2 ? 2 : 1;
}

/// The words of safetensors' header.
constexpr const char* kTexts = "__metadata__";
constexpr const char* kDtype = "dtype";
constexpr const char* kShape = "shape";
constexpr const char* kRange = "data_offsets";

/// Those of torch's HuggingFaceStorageWriter for pieces.
constexpr const char* kBoxes = "DCP_SHARDING_INFO";
constexpr const char* kOffsets = "saved_offsets";

/// Marks a file as part of a checkpoint of ours, even if the marker is missing.
constexpr const char* kWriter = "WRITTEN_BY";

/// More than any tensor has.
constexpr size_t kMostDimensions = 64;

/// What to do about a file that is broken.
constexpr const char* kRemedy = "Restore the file from a copy, or load another checkpoint.";

/// A tensor in a safetensors file, or a piece of one: a file has one piece of a tensor at most.
struct TensorEntry {
  std::string name;
  /// Undefined for a dtype that torch does not have, whose name is `unknown_dtype`. Its elements cannot be read then.
  c10::ScalarType dtype = c10::ScalarType::Float;
  std::string unknown_dtype = {};
  /// The box of the whole tensor that the file has. A file without pieces has whole tensors.
  Box box = {};
  /// The range of its bytes in the file's data, which follows the header.
  int64_t begin = 0;
  int64_t end = 0;
};

/// The beginning of a safetensors file.
struct TensorHeader {
  /// In the order of their data, which they fill without gaps.
  std::vector<TensorEntry> tensors;
  /// The texts that the file has beside its tensors.
  std::map<std::string, std::string> texts;
};

/// What a file has: pieces of a checkpoint of ours, or a model's whole tensors for everybody.
enum class FileKind { pieces, whole };

/// The bytes that give the header's length; the header itself follows them.
constexpr int64_t kLengthBytes = 8;
/// The longest header that readers of safetensors take.
constexpr int64_t kLongestHeader = 100'000'000;

/// Gives these tensors their ranges, in an order in which each is aligned for its dtype, and returns the beginning of
/// a file of them: the length and the header, padded so that the data is aligned to 8 bytes. One of pieces says where
/// they lie, in the words of torch's HuggingFaceStorageWriter, and that shardwise wrote it.
/// Raises ValueError for a dtype without a name in safetensors, a name that comes twice, is empty, no UTF-8 or
/// reserved, sizes that are none, and a header that would be too long.
SHARDWISE_API std::string make_header(std::vector<TensorEntry>& tensors, FileKind kind = FileKind::pieces);

/// The length that a file's first bytes give.
/// Raises Error, with the file's name, if it is not that of a header in a file of so many bytes.
SHARDWISE_API int64_t header_length(std::string_view first_bytes, int64_t file_bytes, const std::string& file);

/// Reads a header, without its length, of a file with so many bytes of data. Nothing in it is trusted.
/// Raises Error, with the names of file and tensor, for what safetensors does not allow: other than JSON, a name that
/// comes twice, sizes or ranges that are negative, too large or unlike each other, ranges that overlap,
/// leave gaps or do not end with the data; and for pieces that are not described as torch does.
SHARDWISE_API TensorHeader parse_header(std::string_view header, int64_t data_bytes, const std::string& file);

} // namespace shardwise::files
