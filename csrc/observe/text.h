#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace shardwise::observe {

using Row = std::vector<std::string>;

std::string megabytes(int64_t bytes);
/// A string of JSON.
std::string quoted(const std::string& text);
/// Aligns the first column to the left, and the others to the right.
std::string aligned(const std::vector<Row>& rows);

/// Builds a JSON object field by field.
class Object {
 public:
  Object& raw(const std::string& name, const std::string& value) {
    text_ += (text_.empty() ? "" : ", ") + quoted(name) + ": " + value;
    return *this;
  }
  Object& text(const std::string& name, const std::string& value) {
    return raw(name, quoted(value));
  }
  Object& number(const std::string& name, int64_t value) {
    return raw(name, std::to_string(value));
  }
  std::string str() const {
    return "{" + text_ + "}";
  }

 private:
  std::string text_;
};

/// A list of JSON.
template <typename Item, typename Render>
std::string list(const std::vector<Item>& items, const Render& render) {
  std::string text;
  for (const auto& item : items) text += (text.empty() ? "" : ", ") + render(item);
  return "[" + text + "]";
}

} // namespace shardwise::observe
