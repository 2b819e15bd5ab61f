#pragma once

#include "base/forked.h"
#include "transport/exchange.h"
#include "transport/transport.h"

#include <ATen/core/ivalue.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <functional>
#include <memory>
#include <thread>
#include <vector>

namespace shardwise::transport {

/// The result of a collective: the value of its future, and the tensors.
struct Outcome {
  c10::IValue value;
  std::vector<at::Tensor> tensors;
};

/// A collective in flight, with torch's interface: wait() with or without a timeout, a future, results.
class DirectWork : public c10d::Work {
 public:
  using Run = std::function<Outcome(Exchange&, Carrier&)>;
  /// `tensors` are for profilers.
  DirectWork(int rank, c10d::OpType type, const char* title, const std::vector<at::Tensor>& tensors, Run run);

  /// Call this before it is issued: the group's id, and this collective's number in it.
  void set_number(uint64_t group, uint64_t number) {
    group_ = group;
    number_ = number;
  }
  /// A wait without a timeout also calls the observers of its thread.
  bool wait(std::chrono::milliseconds timeout) override;
  std::vector<at::Tensor> result() override;
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    return future_;
  }

 private:
  friend class Worker;
  void run(Exchange& exchange, Carrier& carrier);
  void fail(std::exception_ptr error);

  ProgramCall as_seen() const;

  Run run_;
  const char* const title_;
  const int64_t elements_;
  uint64_t group_ = 0;
  uint64_t number_ = 0;
  std::vector<at::Tensor> tensors_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

/// Carries out collectives on its own thread, one after the other, in the order in which they are issued. Callbacks of
/// futures run on that thread too, so they must not wait for another collective of the same worker.
class Worker {
 public:
  Worker(std::unique_ptr<Carrier> carrier, std::unique_ptr<Exchange> exchange);
  /// Closes it.
  ~Worker();

  void issue(c10::intrusive_ptr<DirectWork> work);
  /// The Gloo below. Raises c10::DistBackendError if the worker is closed or a collective failed.
  c10::intrusive_ptr<c10d::Backend> gloo() const;
  uint64_t sent_to(int peer) const;
  /// Fails the current and the waiting collectives with an error that says so, and closes the connections.
  void close();

 private:
  void require_not_forked() const;

  struct State;
  std::shared_ptr<State> state_;
  int64_t forks_ = base::forks();
  std::thread thread_;
};

} // namespace shardwise::transport
