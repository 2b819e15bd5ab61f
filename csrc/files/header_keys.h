#pragma once

#include <cstddef>

namespace shardwise::files {

/// The words of safetensors' header.
constexpr const char* kTexts = "__metadata__";
constexpr const char* kDtype = "dtype";
constexpr const char* kShape = "shape";
constexpr const char* kRange = "data_offsets";

/// Those that torch's HuggingFaceStorageWriter adds, and their values.
constexpr const char* kFormat = "format";
constexpr const char* kFormatValue = "pt";
constexpr const char* kDcpVersion = "DCP_VERSION";
constexpr const char* kDcpVersionValue = "1.0";
constexpr const char* kBoxes = "DCP_SHARDING_INFO";
constexpr const char* kOffsets = "saved_offsets";

/// What a file of a checkpoint of ours says beside them, so that it is known for one where the marker is missing.
constexpr const char* kWriter = "WRITTEN_BY";
constexpr const char* kWriterValue = "shardwise";

/// More than any tensor has.
constexpr size_t kMostDimensions = 64;

/// What to do about a file that is broken.
constexpr const char* kRemedy = "Restore the file from a copy, or load another checkpoint.";

} // namespace shardwise::files
