#pragma once

#include "transport/tcp/connections.h"

#include <c10/util/FunctionRef.h>

#include <cstddef>
#include <string>
#include <vector>

namespace shardwise::transport::tcp {

/// What ranks tell each other before each collective: the call and, if it is small, the data. Receives for the next
/// announcements are posted in advance, so that an announcement costs one message each way.
class Announcements {
 public:
  explicit Announcements(Connections& connections);

  /// Sends each peer this rank's call together with `bytes` bytes of `inlined(peer)`, which may be none. Returns when
  /// all ranks have announced something.
  using Inlined = c10::function_ref<const std::byte*(int peer)>;
  void exchange(const Signature& signature, size_t bytes, Inlined inlined);

  /// The peer's last announcement.
  Signature signature(int peer) const;
  /// The data that came with it.
  const std::byte* data(int peer) const;

  /// Drops the posted receives, which would keep the connections open.
  void end();
  /// Tells the peers why this rank goes no further, in place of its next announcement.
  void send_end_notice(const std::string& reason) noexcept;

 private:
  void expect_next();
  /// Why the peer goes no further, if the message in `place` is an end notice; else empty.
  static std::string end_notice_in(const std::vector<std::byte>& place);

  Connections& connections_;
  std::vector<std::vector<std::byte>> outgoing_;
  std::vector<std::vector<std::byte>> incoming_;
  /// `incoming_` and `coming_` are swapped after each exchange: the next announcement may come while the last one's
  /// data is still in use.
  std::vector<std::vector<std::byte>> coming_;
  std::vector<Message> expected_;
  std::vector<std::byte> end_notice_;
  std::vector<Message> end_notices_;
};

} // namespace shardwise::transport::tcp
