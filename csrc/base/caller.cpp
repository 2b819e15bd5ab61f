#include "base/caller.h"

namespace shardwise::base {
namespace {

CallerLock language_lock;
void (*language_error)() = nullptr;

} // namespace

void set_caller(CallerLock lock, void (*rethrow)()) {
  language_lock = lock;
  language_error = rethrow;
}

WithoutCallerLock::WithoutCallerLock() {
  if (language_lock.release != nullptr) released_ = language_lock.release();
}

WithoutCallerLock::~WithoutCallerLock() {
  if (released_ != nullptr) language_lock.take(released_);
}

void rethrow_for_caller() {
  if (language_error != nullptr) language_error();
}

} // namespace shardwise::base
