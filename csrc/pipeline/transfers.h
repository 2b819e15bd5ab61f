#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <string>
#include <vector>

namespace shardwise::pipeline {

/// What stages on different ranks send each other. Each message says first what it is, so that sizes may differ between
/// microbatches, and a rank that failed can say so instead.
class Transfers {
 public:
  using Tensors = std::vector<at::Tensor>;

  /// A message that is on its way.
  class Arriving {
   public:
    Arriving() = default;
    /// Returns when the tensors are there.
    void arrive();
    /// The tensors, when they are there. One that its sender did not have is undefined.
    Tensors wait();
    /// Whether the sender failed, and has nothing to send.
    bool failed() const {
      return failed_;
    }
    /// Which of the tensors had gradients where they come from.
    const std::vector<bool>& requires_grad() const {
      return requires_grad_;
    }

   private:
    friend class Transfers;
    std::string what_;
    bool failed_ = false;
    Tensors tensors_;
    std::vector<bool> requires_grad_;
    std::vector<c10::intrusive_ptr<c10d::Work>> works_;
  };

  /// `rank` is this rank's number, for errors.
  Transfers(c10::intrusive_ptr<c10d::ProcessGroup> group, at::Device device, int64_t rank)
      : group_(std::move(group)),
        device_(device),
        rank_(rank) {}

  /// Starts to send. `what` names it in errors; `number` tells messages between two ranks in a step apart.
  /// Raises ValueError for what a message cannot have.
  void send(const Tensors& tensors, int to, int number, const std::string& what);
  /// Says that there is nothing to send.
  void send_failure(int to, int number, const std::string& what);
  /// Returns when it is known what comes.
  Arriving receive(int from, int number, const std::string& what);
  /// Returns when all that was sent is on its way, and its memory is free again.
  void finish();

 private:
  void start(const at::Tensor& tensor, int to, int tag, const std::string& what);

  c10::intrusive_ptr<c10d::ProcessGroup> group_;
  at::Device device_;
  int64_t rank_;
  struct Sent {
    c10::intrusive_ptr<c10d::Work> work;
    at::Tensor tensor;
    std::string what;
  };
  std::vector<Sent> sent_;
};

} // namespace shardwise::pipeline
