#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace shardwise::pipeline {

/// What a message has: the number of tensors, and of each its dtype and its sizes.
using MessageLayout = std::vector<int64_t>;

/// What messages had the last time, by the other rank and the message's number. Both ends of a process group know the
/// same, whichever pipelines used it.
struct MessageLayouts {
  std::map<std::pair<int, int>, MessageLayout> sent;
  std::map<std::pair<int, int>, MessageLayout> received;
};

/// What both ends of a message know of it.
struct Message {
  /// The rank at the other end.
  int peer = 0;
  /// Tells messages between two ranks in a step apart.
  int number = 0;
  /// Names it in errors.
  std::string what;

  std::pair<int, int> key() const {
    return {peer, number};
  }
};

/// What stages on different ranks send each other. Each message says first what it is, so that sizes may differ between
/// microbatches and steps, and a rank that failed can say so instead. If tags tell messages apart, as on CPUs, no rank
/// waits for that: a receiver has room for the same sizes as the last time, and other sizes follow the message.
class Transfers {
 public:
  using Tensors = std::vector<at::Tensor>;
  using Work = c10::intrusive_ptr<c10d::Work>;

  /// A message that is on its way.
  class Arriving {
   public:
    /// Whether the sender failed, and has nothing to send. Known once it has arrived, as all that follows.
    bool failed() const {
      return failed_;
    }
    /// Which of the tensors require a gradient on the sender.
    const std::vector<bool>& requires_grad() const {
      return requires_grad_;
    }

    int64_t rows() const {
      return rows_;
    }

   private:
    friend class Transfers;
    Message message_;
    at::Tensor header_;
    Work header_work_;
    /// The tensors for which there is room.
    MessageLayout expected_;
    bool failed_ = false;
    int64_t rows_ = 0;
    Tensors tensors_;
    std::vector<bool> requires_grad_;
    std::vector<Work> works_;
  };

  /// `rank` is this rank's number, for errors.
  Transfers(c10::intrusive_ptr<c10d::ProcessGroup> group, at::Device device, int64_t rank);

  /// Starts to send. `rows` is the number of rows of this part of the batch. Raises ValueError for what a message
  /// cannot have.
  void send(const Tensors& tensors, int64_t rows, const Message& message);
  /// Sends that this rank failed, in place of a message.
  void send_failure(const Message& message);
  Arriving receive(Message message);
  /// Returns when the message is there.
  void arrive(Arriving& arriving);
  /// The tensors, when they are there. One that its sender did not have is undefined.
  Tensors wait(Arriving& arriving);
  /// Returns when all that was sent is on its way, and its memory is free again.
  void finish();

 private:
  /// Whether messages are told apart by tags.
  bool has_tags() const {
    return device_.is_cpu();
  }
  Tensors room_for(const MessageLayout& layout) const;
  void start(const at::Tensor& tensor, const Message& message, int tag);
  void start_all(const Tensors& tensors, const Message& message, int tag);
  Work receive_into(const Arriving& arriving, const at::Tensor& tensor, int tag) const;
  void receive_all(Arriving& arriving, const MessageLayout& layout, int tag) const;
  void read_header(Arriving& arriving);

  c10::intrusive_ptr<c10d::ProcessGroup> group_;
  at::Device device_;
  int64_t rank_;
  std::shared_ptr<MessageLayouts> layouts_;
  struct Sent {
    Work work;
    at::Tensor tensor;
    std::string what;
  };
  std::vector<Sent> sent_;
};

} // namespace shardwise::pipeline
