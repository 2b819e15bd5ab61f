#pragma once

#include <shardwise/export.h>

#include <torch/csrc/distributed/c10d/Work.hpp>

#include <chrono>
#include <memory>

namespace shardwise::comm {

/// Waits for works on its own thread, because some of Gloo's works ignore timeouts. A work that never ends keeps that
/// thread until its process group gives up, but blocks nobody else: neither callers nor the destructor wait for it.
class SHARDWISE_API Waiter {
 public:
  /// A work that is waited for.
  class Ticket;

  Waiter();
  ~Waiter();
  Waiter(const Waiter&) = delete;
  Waiter& operator=(const Waiter&) = delete;

  std::shared_ptr<Ticket> add(c10::intrusive_ptr<c10d::Work> work);
  /// Whether the work ends within this time.
  bool ended(const Ticket& ticket, std::chrono::milliseconds within);

 private:
  struct State;
  std::shared_ptr<State> state_;
};

} // namespace shardwise::comm
