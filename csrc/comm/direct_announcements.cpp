#include "comm/direct_announcements.h"

#include "comm/direct_rule.h"

#include <cstring>

namespace shardwise::comm::direct {

Announcements::Announcements(Wire& wire) : wire_(wire) {
  for (auto* places : {&outgoing_, &incoming_, &coming_}) {
    places->resize(wire.size(), std::vector<std::byte>(sizeof(Signature) + kInline));
  }
  expected_.resize(wire.size());
  expect_next();
}

const std::byte* Announcements::data(int peer) const {
  return incoming_[peer].data() + sizeof(Signature);
}

void Announcements::end() {
  expected_.clear();
}

void Announcements::write(int peer, const Signature& signature, const std::byte* data, size_t bytes) {
  auto* to = outgoing_[peer].data();
  std::memcpy(to, &signature, sizeof(Signature));
  if (bytes > 0) std::memcpy(to + sizeof(Signature), data, bytes);
}

void Announcements::expect_next() {
  for (int peer = 0; peer < wire_.size(); ++peer) {
    if (peer == wire_.rank()) continue;
    expected_[peer] = wire_.receive(peer, coming_[peer].data(), coming_[peer].size(), Phase::announcement);
  }
}

void Announcements::exchange(size_t bytes) {
  std::vector<Message> sent;
  for (int step = 1; step < wire_.size(); ++step) {
    const auto peer = (wire_.rank() + step) % wire_.size();
    sent.push_back(wire_.send(peer, outgoing_[peer].data(), sizeof(Signature) + bytes, Phase::announcement));
  }
  for (int peer = 0; peer < wire_.size(); ++peer) {
    if (peer != wire_.rank()) wire_.wait(expected_[peer]);
  }
  wire_.wait(sent);
  std::swap(incoming_, coming_);
  expect_next();
}

Signature Announcements::signature(int peer) const {
  Signature signature;
  std::memcpy(&signature, incoming_[peer].data(), sizeof(Signature));
  return signature;
}

} // namespace shardwise::comm::direct
