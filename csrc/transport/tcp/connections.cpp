#include "transport/tcp/connections.h"

#include "base/reason.h"

#include <ATen/ops/from_blob.h>

namespace shardwise::transport::tcp {
namespace {

std::vector<at::Tensor> bytes_of(std::byte* data, size_t bytes) {
  return {at::from_blob(data, {static_cast<int64_t>(bytes)}, at::kByte)};
}

} // namespace

Connections::Connections(Carrier& carrier) : carrier_(carrier), sent_(static_cast<size_t>(carrier.progress().size())) {}

int Connections::tag(Phase phase) const {
  // Announcements share one tag: their order tells them apart.
  constexpr uint32_t kNumbers = 16777216;
  const auto number = phase == Phase::announcement ? 0 : static_cast<uint32_t>(carrier_.progress().number() % kNumbers);
  return static_cast<int>(kFirstTag + static_cast<uint32_t>(phase) * kNumbers + number);
}

template <typename Start>
Message Connections::start(int peer, bool to_peer, const Start& start) {
  Message message{.peer = peer, .to_peer = to_peer, .work = nullptr, .reason = ""};
  try {
    message.work = start();
  } catch (const std::exception& error) {
    message.reason = base::reason(error);
  }
  return message;
}

Message Connections::send(int peer, const std::byte* data, size_t bytes, Phase phase) {
  if (phase != Phase::announcement) sent_[peer] += bytes;
  return start(peer, true, [&] {
    auto tensors = bytes_of(const_cast<std::byte*>(data), bytes);
    return carrier_.gloo().send(tensors, peer, tag(phase));
  });
}

Message Connections::receive(int peer, std::byte* data, size_t bytes, Phase phase) {
  return start(peer, false, [&] {
    auto tensors = bytes_of(data, bytes);
    return carrier_.gloo().recv(tensors, peer, tag(phase));
  });
}

void Connections::wait(const Message& message) {
  progress().check();
  if (!message.work) fail(message, message.reason);
  const auto why = carrier_.why_not_done(message.work);
  if (!why) return;
  progress().check();
  fail(message, *why);
}

// A peer that fails says why before it closes its connections: the rank at fault is not always the one that closed
// first.
void Connections::fail(const Message& message, const std::string& reason) {
  if (end_reason_ && !progress().late()) {
    const auto words = end_reason_(message.peer);
    if (!words.empty()) progress().fail_with(message.peer, words);
  }
  progress().fail(message.peer, message.to_peer, reason);
}

bool Connections::has_arrived(const Message& message, std::chrono::milliseconds time) noexcept {
  try {
    return message.work && message.work->wait(time);
  } catch (const std::exception&) {
    return false;
  }
}

void Connections::wait(const std::vector<Message>& messages) {
  for (const auto& message : messages) wait(message);
}

} // namespace shardwise::transport::tcp
