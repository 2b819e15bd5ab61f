#include "files/dtypes.h"

#include "files/in_quotes.h"

#include <shardwise/error.h>

#include <c10/util/StringUtil.h>

#include <array>
#include <utility>

namespace shardwise::files {
namespace {

using Named = std::pair<const char*, c10::ScalarType>;

constexpr std::array kNamedDtypes = {
    Named{"F64", c10::ScalarType::Double},
    Named{"F32", c10::ScalarType::Float},
    Named{"F16", c10::ScalarType::Half},
    Named{"BF16", c10::ScalarType::BFloat16},
    Named{"I64", c10::ScalarType::Long},
    Named{"I32", c10::ScalarType::Int},
    Named{"I16", c10::ScalarType::Short},
    Named{"I8", c10::ScalarType::Char},
    Named{"U64", c10::ScalarType::UInt64},
    Named{"U32", c10::ScalarType::UInt32},
    Named{"U16", c10::ScalarType::UInt16},
    Named{"U8", c10::ScalarType::Byte},
    Named{"BOOL", c10::ScalarType::Bool},
    Named{"F8_E4M3", c10::ScalarType::Float8_e4m3fn},
    Named{"F8_E4M3FNUZ", c10::ScalarType::Float8_e4m3fnuz},
    Named{"F8_E5M2", c10::ScalarType::Float8_e5m2},
    Named{"F8_E5M2FNUZ", c10::ScalarType::Float8_e5m2fnuz},
    Named{"F8_E8M0", c10::ScalarType::Float8_e8m0fnu},
    Named{"F4", c10::ScalarType::Float4_e2m1fn_x2},
    Named{"C64", c10::ScalarType::ComplexFloat},
};

} // namespace

std::string dtype_name(c10::ScalarType dtype, const std::string& parameter) {
  for (const auto& [name, named] : kNamedDtypes) {
    if (named == dtype) return name;
  }
  throw ValueError(c10::str(
      "shardwise: ", in_quotes(parameter), " cannot be saved: files of safetensors have no dtype ",
      c10::toString(dtype), ". Convert it, or leave it out."));
}

std::optional<c10::ScalarType> dtype_of(std::string_view name) {
  for (const auto& [known, dtype] : kNamedDtypes) {
    if (name == known) return dtype;
  }
  return {};
}

} // namespace shardwise::files
