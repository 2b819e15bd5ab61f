#pragma once

#include <shardwise/detail/export.h>

#include <stdexcept>

namespace shardwise {

/// The base of every error that shardwise raises itself. The text says what happened, to which parameter and on which
/// rank if there is one, the rule behind it, and what to do. The class stays the same through backward(). In Python it
/// is shardwise.Error, a RuntimeError.
class SHARDWISE_API Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// The caller gave something that can never work. In Python it is a shardwise.Error that is a ValueError too.
class SHARDWISE_API ValueError : public Error {
 public:
  using Error::Error;
};

/// Another rank, the store or a process group did not answer as it should. In Python it is shardwise.PeerError.
class SHARDWISE_API PeerError : public Error {
 public:
  using Error::Error;
};

} // namespace shardwise
