#include "transport/tcp/announcements.h"

#include "transport/tuning.h"

#include <algorithm>
#include <cstring>

namespace shardwise::transport::tcp {

Announcements::Announcements(Connections& connections) : connections_(connections) {
  for (auto* places : {&outgoing_, &incoming_, &coming_}) {
    places->resize(connections.size(), std::vector<std::byte>(sizeof(Signature) + kInline));
  }
  expected_.resize(connections.size());
  expect_next();
  connections.progress().on_failure([this](const std::string& reason) { send_end_notice(reason); });
  connections.on_closed([this](int peer) {
    const bool came = !expected_.empty() && Connections::has_arrived(expected_[peer], std::chrono::milliseconds(1));
    return came ? end_notice_in(coming_[peer]) : std::string();
  });
}

const std::byte* Announcements::data(int peer) const {
  return incoming_[peer].data() + sizeof(Signature);
}

void Announcements::end() {
  expected_.clear();
  end_notices_.clear();
}

void Announcements::expect_next() {
  for (int peer = 0; peer < connections_.size(); ++peer) {
    if (peer == connections_.rank()) continue;
    expected_[peer] = connections_.receive(peer, coming_[peer].data(), coming_[peer].size(), Phase::announcement);
  }
}

void Announcements::exchange(const Signature& signature, size_t bytes, Inlined inlined) {
  std::vector<Message> sent;
  for (int step = 1; step < connections_.size(); ++step) {
    const auto peer = (connections_.rank() + step) % connections_.size();
    auto* message = outgoing_[peer].data();
    std::memcpy(message, &signature, sizeof(Signature));
    if (bytes > 0) std::memcpy(message + sizeof(Signature), inlined(peer), bytes);
    sent.push_back(connections_.send(peer, message, sizeof(Signature) + bytes, Phase::announcement));
  }
  for (int peer = 0; peer < connections_.size(); ++peer) {
    if (peer == connections_.rank()) continue;
    connections_.wait(expected_[peer]);
    const auto reason = end_notice_in(coming_[peer]);
    if (!reason.empty()) connections_.progress().fail_with(peer, reason);
  }
  connections_.wait(sent);
  std::swap(incoming_, coming_);
  expect_next();
}

// Runs before the connections close. A peer that accepts no more messages will notice that they closed.
void Announcements::send_end_notice(const std::string& reason) noexcept {
  constexpr auto kLimit = std::chrono::milliseconds(500);
  const Signature signature{.kind = Kind::end_notice};
  const auto length = std::min(reason.size(), kInline - 1);
  // Zero-terminated.
  end_notice_.assign(sizeof(Signature) + length + 1, std::byte{0});
  std::memcpy(end_notice_.data(), &signature, sizeof(Signature));
  std::memcpy(end_notice_.data() + sizeof(Signature), reason.data(), length);
  for (int peer = 0; peer < connections_.size(); ++peer) {
    if (peer == connections_.rank()) continue;
    end_notices_.push_back(connections_.send(peer, end_notice_.data(), end_notice_.size(), Phase::announcement));
  }
  for (const auto& message : end_notices_) Connections::has_arrived(message, kLimit);
}

std::string Announcements::end_notice_in(const std::vector<std::byte>& place) {
  Signature signature;
  std::memcpy(&signature, place.data(), sizeof(Signature));
  if (signature.kind != Kind::end_notice) return "";
  return reinterpret_cast<const char*>(place.data() + sizeof(Signature));
}

Signature Announcements::signature(int peer) const {
  Signature signature;
  std::memcpy(&signature, incoming_[peer].data(), sizeof(Signature));
  return signature;
}

} // namespace shardwise::transport::tcp
