#include "comm/direct_wire.h"

#include "comm/direct_error.h"
#include "comm/reason.h"

#include <ATen/ops/from_blob.h>
#include <c10/util/StringUtil.h>

#include <algorithm>

namespace shardwise::comm::direct {
namespace {

using Clock = std::chrono::steady_clock;

/// How soon a closed wire is noticed while the carrier works.
constexpr auto kLook = std::chrono::milliseconds(100);

std::vector<at::Tensor> bytes_of(std::byte* data, size_t bytes) {
  return {at::from_blob(data, {static_cast<int64_t>(bytes)}, at::kByte)};
}

} // namespace

Wire::Wire(c10::intrusive_ptr<c10d::Backend> carrier)
    : carrier_(std::move(carrier)),
      rank_(carrier_->getRank()),
      size_(carrier_->getSize()) {}

std::string Wire::place() const {
  return c10::str("rank ", rank_, " of ", size_, ": ", signature_.describe());
}

c10d::Backend& Wire::carrier() const {
  return *carrier_;
}

void Wire::fail(const std::string& text) {
  if (broken_.empty()) broken_ = text;
  raise_peer_error(text);
}

void Wire::fail(const Message& message, const std::string& reason_given) {
  const bool late = Clock::now() >= deadline_;
  const auto wanted = message.to_peer ? "did not take what this rank sent" : "did not send";
  const auto what = late ? c10::str(wanted, " within ", timeout_.count(), " ms: it is late, or does something else")
                         : "closed the connection: it died, was shut down or failed itself (look for its own error)";
  fail(c10::str(
      "shardwise: ", place(), " failed, for rank ", message.peer, " ", what, ". The reason given: ", reason_given));
}

void Wire::check() {
  {
    const std::lock_guard lock(mutex_);
    if (closed_) fail(c10::str("shardwise: ", place(), " failed, for its process group was shut down on this rank."));
  }
  if (broken_.empty()) return;
  raise_peer_error(c10::str(
      "shardwise: ", place(),
      " was not started, for an earlier collective of this process group failed: make a new process group. ",
      "The first failure: ", broken_));
}

void Wire::begin(const Signature& signature, std::chrono::milliseconds timeout) {
  signature_ = signature;
  timeout_ = timeout;
  deadline_ = Clock::now() + timeout;
  ++number_;
  check();
}

int Wire::tag(Phase phase) const {
  // Announcements are all alike, and told apart by their order.
  constexpr uint32_t kNumbers = 16777216;
  const auto number = phase == Phase::announcement ? 0 : number_ % kNumbers;
  return static_cast<int>(kFirstTag + static_cast<uint32_t>(phase) * kNumbers + number);
}

std::chrono::milliseconds Wire::left() const {
  const auto time = std::chrono::ceil<std::chrono::milliseconds>(deadline_ - Clock::now());
  return std::max(time, std::chrono::milliseconds(1));
}

template <typename Start>
Message Wire::start(int peer, bool to_peer, const Start& start) {
  Message message{.peer = peer, .to_peer = to_peer, .work = nullptr, .reason = ""};
  try {
    message.work = start();
  } catch (const std::exception& error) {
    message.reason = reason(error);
  }
  return message;
}

Message Wire::send(int peer, const std::byte* data, size_t bytes, Phase phase) {
  return start(peer, true, [&] {
    auto tensors = bytes_of(const_cast<std::byte*>(data), bytes);
    return carrier_->send(tensors, peer, tag(phase));
  });
}

Message Wire::receive(int peer, std::byte* data, size_t bytes, Phase phase) {
  return start(peer, false, [&] {
    auto tensors = bytes_of(data, bytes);
    return carrier_->recv(tensors, peer, tag(phase));
  });
}

void Wire::wait(const Message& message) {
  check();
  if (!message.work) fail(message, message.reason);
  std::unique_lock lock(mutex_);
  if (!closed_) waited_for_ = message.work;
  lock.unlock();
  std::string reason_given = "it was aborted";
  bool done = false;
  try {
    done = waited_for_ && message.work->wait(left());
  } catch (const std::exception& error) {
    reason_given = reason(error);
  }
  lock.lock();
  waited_for_.reset();
  lock.unlock();
  if (done) return;
  check();
  fail(message, reason_given);
}

void Wire::wait(const std::vector<Message>& messages) {
  for (const auto& message : messages) wait(message);
}

void Wire::wait(c10d::Work& work) {
  while (!work.isCompleted()) {
    check();
    try {
      work.wait(kLook);
    } catch (const std::exception&) {
      continue; // Only a look; the end tells what happened.
    }
  }
  try {
    work.wait();
  } catch (const std::exception& error) {
    check();
    fail(c10::str("shardwise: ", place(), " failed. The reason given: ", reason(error)));
  }
}

void Wire::close() {
  const std::lock_guard lock(mutex_);
  closed_ = true;
  if (waited_for_) waited_for_->abort();
}

bool Wire::broken() const {
  return !broken_.empty();
}

void Wire::release() {
  carrier_.reset();
}

} // namespace shardwise::comm::direct
