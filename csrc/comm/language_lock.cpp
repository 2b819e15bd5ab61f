#include "comm/language_lock.h"

namespace shardwise::comm {
namespace {

LanguageLock language_lock;

} // namespace

void set_language_lock(LanguageLock lock) {
  language_lock = lock;
}

WithoutLanguageLock::WithoutLanguageLock() {
  if (language_lock.release != nullptr) released_ = language_lock.release();
}

WithoutLanguageLock::~WithoutLanguageLock() {
  if (released_ != nullptr) language_lock.take(released_);
}

} // namespace shardwise::comm
