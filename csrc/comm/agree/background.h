#pragma once

#include <shardwise/detail/export.h>

#include <functional>
#include <future>
#include <memory>

namespace shardwise::comm {

/// Does tasks on its own thread, one after the other. One that never ends keeps that thread, but blocks nobody else:
/// neither callers nor the destructor wait for it.
class SHARDWISE_API Background {
 public:
  Background();
  ~Background();
  Background(const Background&) = delete;
  Background& operator=(const Background&) = delete;

  /// The result is ready when the task has ended, with an error or without.
  std::future<void> add(std::function<void()> task);

 private:
  struct State;
  std::shared_ptr<State> state_;
};

} // namespace shardwise::comm
