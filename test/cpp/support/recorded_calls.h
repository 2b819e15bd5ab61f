#pragma once

#include <ATen/record_function.h>

#include <map>
#include <memory>
#include <mutex>
#include <string>

namespace shardwise::test {

/// Counts, by name, the operations and labels that all threads record while it lives. One at a time.
class RecordedCalls {
 public:
  using Counts = std::map<std::string, int>;

  RecordedCalls() {
    counts_.clear();
    const auto count = [](const at::RecordFunction& call) -> std::unique_ptr<at::ObserverContext> {
      const std::lock_guard lock(mutex_);
      ++counts_[call.name()];
      return nullptr;
    };
    handle_ = at::addGlobalCallback(at::RecordFunctionCallback(count).scopes({at::RecordScope::FUNCTION}));
  }
  RecordedCalls(const RecordedCalls&) = delete;
  RecordedCalls& operator=(const RecordedCalls&) = delete;
  ~RecordedCalls() {
    at::removeCallback(handle_);
  }

  Counts counts() const {
    const std::lock_guard lock(mutex_);
    return counts_;
  }
  /// Of matrices.
  int products() const {
    auto all = counts();
    return all["aten::mm"] + all["aten::addmm"];
  }

 private:
  static inline std::mutex mutex_;
  static inline Counts counts_;
  at::CallbackHandle handle_;
};

} // namespace shardwise::test
