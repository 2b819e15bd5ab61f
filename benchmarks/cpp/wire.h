#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <chrono>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

/// A modelled link between this rank and the others: what is sent waits for what was sent before, and takes a latency
/// and as long as its bytes do. The collectives are those of another back end, over no sooner than the link would be
/// done.
class Wire : public std::enable_shared_from_this<Wire> {
 public:
  using Seconds = std::chrono::duration<double>;
  struct Speed {
    Seconds latency{0};
    /// 0: as fast as the other back end.
    double bytes_per_second = 0;
  };

  virtual ~Wire() = default;
  void set_speed(const Speed& speed);
  /// How long the link was busy so far, and what it carried.
  Seconds busy() const;
  double bytes() const;
  /// The same collectives over this wire.
  c10::intrusive_ptr<c10d::Backend> over(c10::intrusive_ptr<c10d::Backend> inner);

 protected:
  using Start = std::function<c10::intrusive_ptr<c10d::Work>()>;
  /// Starts it and returns what is done when the link is, with these results.
  virtual c10::intrusive_ptr<c10d::Work> carry(const Start& start, std::vector<at::Tensor> results, Seconds takes) = 0;

 private:
  class Backend;
  c10::intrusive_ptr<c10d::Work> send(const Start& start, std::vector<at::Tensor> results, double bytes);

  mutable std::mutex mutex_;
  Speed speed_;
  Seconds busy_{0};
  double bytes_ = 0;
};

/// Done when its future is.
class FutureWork : public c10d::Work {
 public:
  explicit FutureWork(const std::vector<c10::Device>& devices);
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;
  /// On a device, the current stream waits.
  bool wait(std::chrono::milliseconds timeout) override;
  void end(const std::vector<at::Tensor>& results, const std::exception_ptr& error);

 private:
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};
