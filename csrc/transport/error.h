#pragma once

#include <c10/util/Exception.h>

#include <string>

namespace shardwise::transport {

// torch's own classes, because Python knows them, but without the stack trace that torch would add to the text.

[[noreturn]] inline void raise_backend_error(const std::string& text) {
  throw c10::DistBackendError(text, nullptr);
}

[[noreturn]] inline void raise_value_error(const std::string& text) {
  throw c10::ValueError(text, nullptr);
}

} // namespace shardwise::transport
