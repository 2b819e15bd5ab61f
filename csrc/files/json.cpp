#include "files/json.h"

#include "files/in_quotes.h"

#include <shardwise/error.h>

#include <c10/util/StringUtil.h>

#include <nlohmann/json.hpp>

#include <cmath>
#include <limits>
#include <unordered_set>

namespace shardwise::files {
namespace {

/// Builds a value while the parser goes through a text, and stops it where a limit is passed.
class JsonBuilder final : public nlohmann::json_sax<nlohmann::json> {
 public:
  bool null() override {
    return put({});
  }
  bool boolean(bool value) override {
    return put(value);
  }
  bool number_integer(number_integer_t value) override {
    return put(int64_t{value});
  }
  // A number that no int64_t holds is as good as one with a fraction: no size and no offset.
  bool number_unsigned(number_unsigned_t value) override {
    if (value <= static_cast<uint64_t>(std::numeric_limits<int64_t>::max())) return put(static_cast<int64_t>(value));
    return put(static_cast<double>(value));
  }
  bool number_float(number_float_t value, const string_t&) override {
    return put(value);
  }
  bool string(string_t& value) override {
    return put(std::move(value));
  }
  bool binary(binary_t&) override {
    return fail("it has bytes that are not JSON");
  }
  bool start_object(std::size_t) override {
    return open(Json::Object());
  }
  bool end_object() override {
    return close();
  }
  bool start_array(std::size_t) override {
    return open(Json::List());
  }
  bool end_array() override {
    return close();
  }
  bool key(string_t& name) override {
    auto& level = open_.back();
    if (!level.names.insert(name).second)
      return fail(c10::str("the name ", in_quotes(name), " comes twice in an object"));
    level.name = std::move(name);
    return true;
  }
  bool parse_error(std::size_t position, const std::string&, const nlohmann::json::exception&) override {
    return fail(c10::str("it is broken at byte ", position));
  }

  const std::string& problem() const {
    return problem_;
  }
  Json take() {
    return std::move(result_);
  }

 private:
  /// A list or an object that is not complete, with what is known of the member to come.
  struct Level {
    Json value;
    std::string name;
    std::unordered_set<std::string> names;
  };

  bool fail(std::string why) {
    problem_ = std::move(why);
    return false;
  }
  bool put(Json value) {
    if (++count_ > kMostJsonValues) return fail(c10::str("it has more than ", kMostJsonValues, " values"));
    if (open_.empty()) {
      result_ = std::move(value);
      return true;
    }
    auto& level = open_.back();
    if (auto* list = std::get_if<Json::List>(&level.value.value)) {
      list->push_back(std::move(value));
    } else {
      std::get<Json::Object>(level.value.value).emplace_back(std::move(level.name), std::move(value));
    }
    return true;
  }
  bool open(Json value) {
    if (open_.size() == kDeepestJson) return fail(c10::str("it is nested deeper than ", kDeepestJson, " levels"));
    open_.push_back({.value = std::move(value), .name = {}, .names = {}});
    return true;
  }
  bool close() {
    auto value = std::move(open_.back().value);
    open_.pop_back();
    return put(std::move(value));
  }

  std::vector<Level> open_;
  size_t count_ = 0;
  Json result_;
  std::string problem_;
};

std::string text_of_string(const std::string& text) {
  if (!is_utf8(text)) {
    throw ValueError(c10::str(
        "shardwise: the text ", in_quotes(text), " is not valid UTF-8, so JSON cannot represent it. Encode it first."));
  }
  return nlohmann::json(text).dump();
}

void write_json(const Json& json, size_t depth, std::string& text) {
  if (depth > kDeepestJson)
    throw ValueError(c10::str("shardwise: a value is nested deeper than ", kDeepestJson, " levels."));
  const char* separator = "";
  if (const auto* list = json.as<Json::List>()) {
    text += '[';
    for (const auto& each : *list) {
      text += std::exchange(separator, ", ");
      write_json(each, depth + 1, text);
    }
    text += ']';
  } else if (const auto* object = json.as<Json::Object>()) {
    text += '{';
    for (const auto& [name, value] : *object) {
      text += std::exchange(separator, ", ") + text_of_string(name) + ": ";
      write_json(value, depth + 1, text);
    }
    text += '}';
  } else if (const auto* string = json.as<std::string>()) {
    text += text_of_string(*string);
  } else if (const auto* fraction = json.as<double>()) {
    if (!std::isfinite(*fraction))
      throw ValueError("shardwise: JSON cannot represent NaN or infinity. Give a finite number.");
    text += nlohmann::json(*fraction).dump();
  } else if (const auto* number = json.as<int64_t>()) {
    text += std::to_string(*number);
  } else if (const auto* truth = json.as<bool>()) {
    text += *truth ? "true" : "false";
  } else {
    text += "null";
  }
}

} // namespace

const Json* Json::find(std::string_view name) const {
  const auto* object = as<Object>();
  if (object == nullptr) return nullptr;
  for (const auto& [known, value] : *object) {
    if (known == name) return &value;
  }
  return nullptr;
}

Json parse_json(std::string_view text, const std::string& what) {
  JsonBuilder builder;
  // To the parser it would be the end of the text.
  const auto nul = text.find('\0');
  if (nul != std::string_view::npos)
    throw Error(c10::str("shardwise: ", what, " is not the JSON that it should be: it has a NUL at byte ", nul, "."));
  if (!nlohmann::json::sax_parse(text, &builder))
    throw Error(c10::str("shardwise: ", what, " is not the JSON that it should be: ", builder.problem(), "."));
  return builder.take();
}

std::string json_text(const Json& value) {
  std::string text;
  write_json(value, 0, text);
  return text;
}

} // namespace shardwise::files
