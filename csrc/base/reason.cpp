#include "base/reason.h"

#include <c10/util/Exception.h>

namespace shardwise::base {
namespace {

void replace_all(std::string& text, const std::string& what, const std::string& by) {
  for (auto at = text.find(what); at != std::string::npos; at = text.find(what, at + by.size())) {
    text.replace(at, what.size(), by);
  }
}

} // namespace

std::string text_of(const std::exception& error) {
  const auto* traced = dynamic_cast<const c10::Error*>(&error);
  return traced == nullptr ? error.what() : traced->what_without_backtrace();
}

std::string reason(const std::exception& error) {
  auto text = text_of(error);
  replace_all(text, "shardwise: ", "");
  replace_all(text, ". Details: ", ". ");
  replace_all(text, ". The reason: ", ": ");
  return text;
}

} // namespace shardwise::base
