#include "comm/direct_wire.h"

#include "comm/reason.h"

#include <ATen/ops/from_blob.h>
#include <c10/util/StringUtil.h>

namespace shardwise::comm::direct {
namespace {

/// How soon a closed wire is noticed while the carrier works.
constexpr auto kLook = std::chrono::milliseconds(100);

std::vector<at::Tensor> bytes_of(std::byte* data, size_t bytes) {
  return {at::from_blob(data, {static_cast<int64_t>(bytes)}, at::kByte)};
}

} // namespace

Wire::Wire(c10::intrusive_ptr<c10d::Backend> carrier, std::vector<int64_t> names)
    : carrier_(std::move(carrier)),
      course_(carrier_->getRank(), carrier_->getSize(), std::move(names)),
      sent_(static_cast<size_t>(carrier_->getSize())) {}

c10d::Backend& Wire::carrier() const {
  return *carrier_;
}

int Wire::tag(Phase phase) const {
  // Announcements are all alike, and told apart by their order.
  constexpr uint32_t kNumbers = 16777216;
  const auto number = phase == Phase::announcement ? 0 : static_cast<uint32_t>(course_.number() % kNumbers);
  return static_cast<int>(kFirstTag + static_cast<uint32_t>(phase) * kNumbers + number);
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
  if (phase != Phase::announcement) sent_[peer] += bytes;
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
  course_.check();
  if (!message.work) fail(message, message.reason);
  std::unique_lock lock(mutex_);
  if (!course_.closed()) waited_for_ = message.work;
  lock.unlock();
  std::string reason_given = "it was aborted";
  bool done = false;
  try {
    done = waited_for_ && message.work->wait(course_.left());
  } catch (const std::exception& error) {
    reason_given = reason(error);
  }
  lock.lock();
  waited_for_.reset();
  lock.unlock();
  if (done) return;
  course_.check();
  fail(message, reason_given);
}

// A peer that closes a connection after it failed told why: who died is not who closed first.
void Wire::fail(const Message& message, const std::string& reason) {
  if (last_words_ && !course_.late()) {
    const auto words = last_words_(message.peer);
    if (!words.empty()) course_.fail_with(message.peer, words);
  }
  course_.fail(message.peer, message.to_peer, reason);
}

bool Wire::has_come(const Message& message, std::chrono::milliseconds time) noexcept {
  try {
    return message.work && message.work->wait(time);
  } catch (const std::exception&) {
    return false;
  }
}

void Wire::wait(const std::vector<Message>& messages) {
  for (const auto& message : messages) wait(message);
}

void Wire::wait(c10d::Work& work) {
  while (!work.isCompleted()) {
    course_.check();
    try {
      work.wait(kLook);
    } catch (const std::exception&) {
      continue; // Only a look; the end tells what happened.
    }
  }
  try {
    work.wait();
  } catch (const std::exception& error) {
    course_.check();
    course_.fail(c10::str("shardwise: ", course_.place(), " failed. The reason given: ", reason(error)));
  }
}

void Wire::close() {
  const std::lock_guard lock(mutex_);
  course_.close();
  if (waited_for_) waited_for_->abort();
}

void Wire::release() {
  carrier_.reset();
}

} // namespace shardwise::comm::direct
