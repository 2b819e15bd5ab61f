#pragma once

#include <shardwise/detail/export.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

namespace shardwise::files {

/// A value of JSON: null, a truth value, a whole number, another number, a text, a list or an object.
struct SHARDWISE_API Json {
  using List = std::vector<Json>;
  /// In the order of the text. No name comes twice.
  using Object = std::vector<std::pair<std::string, Json>>;
  using Value = std::variant<std::nullptr_t, bool, int64_t, double, std::string, List, Object>;

  Json() = default;
  Json(bool value) : value(value) {}
  Json(int value) : value(int64_t{value}) {}
  Json(int64_t value) : value(value) {}
  Json(double value) : value(value) {}
  Json(std::string value) : value(std::move(value)) {}
  Json(const char* value) : value(std::string(value)) {}
  Json(List value) : value(std::move(value)) {}
  Json(const std::vector<int64_t>& numbers) : value(List(numbers.begin(), numbers.end())) {}
  Json(Object value) : value(std::move(value)) {}

  /// The value as this type; nullptr if it is of another.
  template <typename T>
  const T* as() const {
    return std::get_if<T>(&value);
  }
  /// A member of an object; nullptr if it has none of this name, or if this is no object.
  const Json* find(std::string_view name) const;
  bool operator==(const Json& other) const {
    return value == other.value;
  }

  Value value;
};

/// How deep lists and objects may lie in each other.
constexpr size_t kDeepestJson = 32;
/// How many values a text may have: more than those of 500 000 tensors, and few enough for any machine's memory.
constexpr size_t kMostJsonValues = 5'000'000;

/// Reads all of a text, which must be UTF-8. `what` is the text's name in errors.
/// Raises Error for anything that is not JSON, for an object with a name that comes twice, and for a text that is
/// nested deeper, or has more values, than these limits.
SHARDWISE_API Json parse_json(std::string_view text, const std::string& what);

/// The value in one line. Numbers become the same numbers again.
/// Raises ValueError for a text that is no UTF-8, a number that is infinite or none, and for what is nested too deep.
SHARDWISE_API std::string json_text(const Json& value);

} // namespace shardwise::files
