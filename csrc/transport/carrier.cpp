#include "transport/carrier.h"

#include "base/ends_within.h"
#include "base/reason.h"

#include <c10/util/StringUtil.h>

#include <utility>

namespace shardwise::transport {
namespace {

/// How often to check for a closed carrier while Gloo works.
constexpr auto kLook = std::chrono::milliseconds(100);

} // namespace

Carrier::Carrier(c10::intrusive_ptr<c10d::Backend> gloo, std::vector<int64_t> names)
    : gloo_(std::move(gloo)),
      progress_(gloo_->getRank(), gloo_->getSize(), std::move(names)) {}

std::optional<std::string> Carrier::why_not_done(const c10::intrusive_ptr<c10d::Work>& message) {
  std::unique_lock lock(mutex_);
  if (!progress_.closed()) waited_for_ = message;
  lock.unlock();
  std::string why = "it was aborted";
  bool done = false;
  try {
    done = waited_for_ && message->wait(progress_.left());
  } catch (const std::exception& error) {
    why = base::reason(error);
  }
  lock.lock();
  waited_for_.reset();
  lock.unlock();
  return done ? std::nullopt : std::optional(why);
}

void Carrier::wait(c10d::Work& work) {
  while (!work.isCompleted() && !base::ends_within(work, kLook)) progress_.check();
  try {
    work.wait();
  } catch (const std::exception& error) {
    progress_.check();
    progress_.fail(c10::str("shardwise: ", progress_.describe_call(), " failed. Details: ", base::reason(error)));
  }
}

void Carrier::close() {
  const std::lock_guard lock(mutex_);
  progress_.close();
  if (waited_for_) waited_for_->abort();
}

// Gloo is destroyed outside the lock, because that takes a while.
void Carrier::release() {
  std::unique_lock lock(mutex_);
  const auto ending = std::exchange(gloo_, {});
  lock.unlock();
}

} // namespace shardwise::transport
