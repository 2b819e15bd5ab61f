#pragma once

#include "transport/tcp/connections.h"

#include <cstddef>
#include <string>
#include <vector>

namespace shardwise::transport::tcp {

/// What ranks tell each other before each collective: what it is and, where that is little, their data along with it.
/// Receives for the next announcements are there in advance, so one costs one message each way.
class Announcements {
 public:
  explicit Announcements(Connections& connections);

  /// Sends each peer what this rank does, with the bytes for that peer: all of `inlined(peer)`, `bytes` of them, or
  /// none. Returns when all have announced something.
  template <typename Data>
  void exchange(const Signature& signature, size_t bytes, const Data& inlined) {
    for (int peer = 0; peer < connections_.size(); ++peer) {
      if (peer != connections_.rank()) write(peer, signature, inlined(peer), bytes);
    }
    exchange(bytes);
  }

  /// What a peer announced last.
  Signature signature(int peer) const;
  /// What came along with that.
  const std::byte* data(int peer) const;

  /// Expects nothing any more: what is expected keeps the connections open.
  void end();
  /// Tells the peers why this rank goes no further, in the place of what it would announce next.
  void say_farewell(const std::string& reason) noexcept;

 private:
  void write(int peer, const Signature& signature, const std::byte* data, size_t bytes);
  void exchange(size_t bytes);
  void expect_next();
  /// Why a peer goes no further, if it said so in what came last to these places.
  static std::string farewell_in(const std::vector<std::byte>& place);

  Connections& connections_;
  std::vector<std::vector<std::byte>> outgoing_;
  std::vector<std::vector<std::byte>> incoming_;
  /// Two sets of places in turns, for the data of this collective is still in use when the next may come.
  std::vector<std::vector<std::byte>> coming_;
  std::vector<Message> expected_;
  std::vector<std::byte> farewell_;
  std::vector<Message> farewells_;
};

} // namespace shardwise::transport::tcp
