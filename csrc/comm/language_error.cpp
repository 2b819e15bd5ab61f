#include "comm/language_error.h"

namespace shardwise::comm {
namespace {

void (*language_error)() = nullptr;

} // namespace

void set_language_error(void (*rethrow)()) {
  language_error = rethrow;
}

void rethrow_for_language() {
  if (language_error != nullptr) language_error();
}

} // namespace shardwise::comm
