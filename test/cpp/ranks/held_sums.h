#pragma once

#include <torch/torch.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <condition_variable>
#include <deque>
#include <memory>
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
    const std::lock_guard lock(state_->mutex);
    auto work = c10::make_intrusive<Work>(state_, output, input, group);
    state_->held.push_back(work.get());
    if (state_->held.size() >= most_) state_->release_first();
    return work;
  }
  /// From now on none is held.
  void release_all() {
    const std::lock_guard lock(state_->mutex);
    held_at_the_end = state_->held.size();
    while (!state_->held.empty()) state_->release_first();
    most_ = 1;
  }
  void set_most_held(size_t most) {
    const std::lock_guard lock(state_->mutex);
    most_ = most;
  }

  /// How many were held when release_all() was called.
  size_t held_at_the_end = 0;

 private:
  class Work;
  struct State {
    std::mutex mutex;
    std::condition_variable changed;
    std::deque<Work*> held;
    void release_first();
  };

  class Work : public c10d::Work {
   public:
    Work(
        std::shared_ptr<State> state, const torch::Tensor& output, const torch::Tensor& input,
        c10d::ProcessGroup& group)
        : state_(std::move(state)),
          output_(output),
          input_(input),
          group_(group) {}
    bool isCompleted() override {
      const std::lock_guard lock(state_->mutex);
      return done_;
    }
    bool wait(std::chrono::milliseconds timeout) override {
      std::unique_lock lock(state_->mutex);
      const auto is_free = [&] { return free_; };
      if (timeout == std::chrono::milliseconds::zero()) {
        state_->changed.wait(lock, is_free);
      } else if (!state_->changed.wait_for(lock, timeout, is_free)) {
        throw std::runtime_error("this sum is held");
      }
      if (std::exchange(done_, true)) return true;
      sum_and_let_go(input_, group_);
      output_.copy_(input_.chunk(group_.getSize())[group_.getRank()]);
      return true;
    }
    bool free_ = false;

   private:
    std::shared_ptr<State> state_;
    torch::Tensor output_;
    torch::Tensor input_;
    c10d::ProcessGroup& group_;
    bool done_ = false;
  };

  std::shared_ptr<State> state_ = std::make_shared<State>();
  size_t most_;
};

inline void HeldSums::State::release_first() {
  held.front()->free_ = true;
  held.pop_front();
  changed.notify_all();
}

} // namespace shardwise::test
