#pragma once

#include <torch/torch.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <atomic>
#include <deque>
#include <future>
#include <mutex>
#include <stdexcept>

namespace shardwise::test {

/// Sums in place. The group's thread lets go of a tensor when it comes to the next call at the latest, so there is one
/// more: its memory is free afterwards.
inline void sum_and_let_go(const torch::Tensor& tensor, c10d::ProcessGroup& group) {
  for (const auto& each : {tensor, torch::zeros({1}, tensor.options())}) {
    std::vector<torch::Tensor> all{each};
    group.allreduce(all)->wait();
  }
}

/// Reduce-scatters that are carried out, in their order, once so many are under way together, or once release_all() was
/// called.
class HeldSums {
 public:
  explicit HeldSums(size_t most) : most_(most) {}

  c10::intrusive_ptr<c10d::Work> start(torch::Tensor& output, torch::Tensor& input, c10d::ProcessGroup& group) {
    const std::lock_guard lock(mutex_);
    held_.push_back(c10::make_intrusive<Work>(output, input, group));
    c10::intrusive_ptr<c10d::Work> work = held_.back();
    if (held_.size() >= most_) release_first();
    return work;
  }
  /// From now on none is held.
  void release_all() {
    const std::lock_guard lock(mutex_);
    held_at_the_end = held_.size();
    while (!held_.empty()) release_first();
    most_ = 1;
  }
  void set_most_held(size_t most) {
    const std::lock_guard lock(mutex_);
    most_ = most;
  }

  /// How many were held when release_all() was called.
  size_t held_at_the_end = 0;

 private:
  class Work : public c10d::Work {
   public:
    Work(const torch::Tensor& output, const torch::Tensor& input, c10d::ProcessGroup& group)
        : output_(output),
          input_(input),
          group_(group) {}
    bool isCompleted() override {
      return done_;
    }
    bool wait(std::chrono::milliseconds timeout) override {
      if (timeout == std::chrono::milliseconds::zero()) {
        free_.wait();
      } else if (free_.wait_for(timeout) != std::future_status::ready) {
        throw std::runtime_error("this sum is held");
      }
      const std::lock_guard lock(mutex_);
      if (done_) return true;
      sum_and_let_go(input_, group_);
      output_.copy_(input_.chunk(group_.getSize())[group_.getRank()]);
      done_ = true;
      return true;
    }
    void release() {
      gate_.set_value();
    }

   private:
    torch::Tensor output_;
    torch::Tensor input_;
    c10d::ProcessGroup& group_;
    std::promise<void> gate_;
    std::future<void> free_ = gate_.get_future();
    std::mutex mutex_;
    std::atomic<bool> done_ = false;
  };

  void release_first() {
    held_.front()->release();
    held_.pop_front();
  }

  std::mutex mutex_;
  std::deque<c10::intrusive_ptr<Work>> held_;
  size_t most_;
};

} // namespace shardwise::test
