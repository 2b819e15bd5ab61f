#pragma once

#include <cstdlib>
#include <string>
#include <utility>

namespace shardwise::test {

/// Tests have two forms. The short one, of `make test`, shows each rule once: few ranks, few steps. The long one, of
/// `make test-all`, takes more of both; SHARDWISE_TEST_FORM=long asks for it.
inline bool is_long_form() {
  static const char* form = std::getenv("SHARDWISE_TEST_FORM");
  return form != nullptr && std::string(form) == "long";
}

template <typename T>
T by_form(T in_short, T in_long) {
  return is_long_form() ? std::move(in_long) : std::move(in_short);
}

} // namespace shardwise::test
