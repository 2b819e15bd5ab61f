#include "comm/direct_announcements.h"

#include "comm/direct_error.h"
#include "comm/direct_rule.h"

#include <c10/util/StringUtil.h>

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

void Announcements::exchange(const Signature& signature, size_t bytes) {
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
  for (int peer = 0; peer < wire_.size(); ++peer) {
    if (peer == wire_.rank()) continue;
    Signature theirs;
    std::memcpy(&theirs, incoming_[peer].data(), sizeof(Signature));
    if (theirs == signature) continue;
    raise_peer_error(c10::str(
        "shardwise: rank ", wire_.rank(), " of ", wire_.size(), ": the ranks do not call the same collective: rank ",
        wire_.rank(), " calls ", signature.describe(), ", but rank ", peer, " calls ", theirs.describe(),
        ". All ranks of a process group must call the same collectives with the same sizes, in the same order. "
        "Nothing was sent."));
  }
}

} // namespace shardwise::comm::direct
