#pragma once

namespace shardwise::test {

/// A TCP port of this machine that nobody else gets while this lives: it is bound, but nobody listens to it, so a
/// server that reuses addresses (as TCPStore does) may take it.
class Port {
 public:
  Port();
  ~Port();
  Port(const Port&) = delete;
  Port& operator=(const Port&) = delete;

  int number() const {
    return number_;
  }
  /// From now on somebody listens, and never answers.
  void listen() const;

 private:
  int socket_;
  int number_ = 0;
};

} // namespace shardwise::test
