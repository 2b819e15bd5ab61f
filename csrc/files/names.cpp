#include "files/names.h"

#include <c10/util/StringUtil.h>

#include <algorithm>

namespace shardwise::files {
namespace {

std::string five_digits(int64_t number) {
  auto digits = std::to_string(number);
  return std::string(5 - std::min<size_t>(digits.size(), 5), '0') + digits;
}

} // namespace

bool is_plain_name(std::string_view name) {
  return !name.empty() && name != "." && name != ".." && name.find('/') == std::string_view::npos &&
         name.find('\0') == std::string_view::npos;
}

bool is_tensor_file(std::string_view name, std::string_view end) {
  return is_plain_name(name) && name.ends_with(end);
}

std::string tensor_file_name(int64_t shard, int64_t file, int64_t files) {
  return c10::str(
      "shard-", five_digits(shard), "-model-", five_digits(file), "-of-", five_digits(files), kTensorFileEnd);
}

std::string whole_file_name(int64_t file, int64_t files) {
  if (files == 1) return c10::str("model", kTensorFileEnd);
  return c10::str("model-", five_digits(file), "-of-", five_digits(files), kTensorFileEnd);
}

} // namespace shardwise::files
