#include "files/marker_values.h"

#include "files/header_keys.h"
#include "files/in_quotes.h"

#include <shardwise/error.h>

#include <c10/util/StringUtil.h>

#include <cmath>
#include <limits>
#include <utility>

namespace shardwise::files {
namespace {

constexpr const char* kNumber = "number";

constexpr std::pair<const char*, double> kSpecialNumbers[] = {
    {"inf", std::numeric_limits<double>::infinity()},
    {"-inf", -std::numeric_limits<double>::infinity()},
    {"nan", std::numeric_limits<double>::quiet_NaN()},
};

Json json_of_special(double number) {
  for (const auto& [word, special] : kSpecialNumbers) {
    if (number == special || (std::isnan(number) && std::isnan(special))) return Json::Object{{kNumber, word}};
  }
  return number;
}

} // namespace

Json json_of_value(const Json& value, const std::string& name) {
  if (const auto* number = value.as<double>()) return json_of_special(*number);
  if (const auto* list = value.as<Json::List>()) {
    Json::List items;
    for (const auto& item : *list) items.push_back(json_of_value(item, name));
    return items;
  }
  if (value.as<std::nullptr_t>() != nullptr || value.as<Json::Object>() != nullptr) {
    throw ValueError(c10::str(
        "shardwise: the value ", in_quotes(name),
        " cannot be saved: it must be a number, a text, a truth value, or a list of these."));
  }
  return value;
}

Json value_of(const Json& json, const std::string& path) {
  if (const auto* list = json.as<Json::List>()) {
    Json::List items;
    for (const auto& item : *list) items.push_back(value_of(item, path));
    return items;
  }
  if (json.as<Json::Object>() == nullptr && json.as<std::nullptr_t>() == nullptr) return json;
  const auto* word = json.find(kNumber) == nullptr ? nullptr : json.find(kNumber)->as<std::string>();
  for (const auto& [special, number] : kSpecialNumbers) {
    if (word != nullptr && *word == special) return number;
  }
  throw Error(c10::str("shardwise: ", path, " has a value that no program saved. ", kRemedy));
}

} // namespace shardwise::files
