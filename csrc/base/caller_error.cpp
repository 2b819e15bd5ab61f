#include "base/caller_error.h"

namespace shardwise::base {
namespace {

void (*language_error)() = nullptr;

} // namespace

void set_caller_error(void (*rethrow)()) {
  language_error = rethrow;
}

void rethrow_for_caller() {
  if (language_error != nullptr) language_error();
}

} // namespace shardwise::base
