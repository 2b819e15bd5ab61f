#include "base/caller_lock.h"

namespace shardwise::base {
namespace {

CallerLock language_lock;

} // namespace

void set_caller_lock(CallerLock lock) {
  language_lock = lock;
}

WithoutCallerLock::WithoutCallerLock() {
  if (language_lock.release != nullptr) released_ = language_lock.release();
}

WithoutCallerLock::~WithoutCallerLock() {
  if (released_ != nullptr) language_lock.take(released_);
}

} // namespace shardwise::base
