#pragma once

#include "base/forked.h"
#include "transport/exchange.h"
#include "transport/onlooker.h"

#include <ATen/core/ivalue.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

namespace shardwise::transport {

/// What a collective gives: the value of its future, and the tensors.
struct Outcome {
  c10::IValue value;
  std::vector<at::Tensor> tensors;
};

/// A collective under way, as torch's users know it: wait() with or without a timeout, a future, results.
class DirectWork : public c10d::Work {
 public:
  using Run = std::function<Outcome(Exchange&, Carrier&)>;
  /// `tensors` are what profilers see.
  DirectWork(int rank, c10d::OpType type, const char* title, const std::vector<at::Tensor>& tensors, Run run);

  /// Before it is issued: how all ranks number it.
  void set_number(uint64_t group, uint64_t number) {
    group_ = group;
    number_ = number;
  }
  /// A wait without a limit of its own asks the onlookers of its thread.
  bool wait(std::chrono::milliseconds timeout) override;
  std::vector<at::Tensor> result() override;
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;

 private:
  friend class Worker;
  void run(Exchange& exchange, Carrier& carrier);
  void fail(std::exception_ptr error);

  OwnCall as_seen() const;

  Run run_;
  const char* const title_;
  const int64_t elements_;
  uint64_t group_ = 0;
  uint64_t number_ = 0;
  std::vector<at::Tensor> tensors_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

/// Carries out collectives one after the other, in the order in which they are issued, on a thread of its own.
/// Callbacks of futures run there too: they must not wait for another collective of the same worker.
class Worker {
 public:
  /// `make` is asked once, here. `names` are what errors call the ranks; empty: by their positions.
  Worker(c10::intrusive_ptr<c10d::Backend> gloo, const MakeExchange& make, std::vector<int64_t> names);
  /// Closes it.
  ~Worker();
  Worker(const Worker&) = delete;
  Worker& operator=(const Worker&) = delete;

  void issue(c10::intrusive_ptr<DirectWork> work);
  /// What carries the messages. Raises c10::DistBackendError when it is closed or broken.
  c10::intrusive_ptr<c10d::Backend> gloo() const;
  /// Collectives so far.
  uint64_t issued() const;
  uint64_t sent_to(int peer) const;
  /// What is under way or waits fails with an error that says so, and the connections are closed.
  void close();

 private:
  void require_not_forked() const;

  struct State;
  std::shared_ptr<State> state_;
  int64_t forks_ = base::forks();
  std::thread thread_;
};

} // namespace shardwise::transport
