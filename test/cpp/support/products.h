#pragma once

#include <ATen/record_function.h>

#include <atomic>
#include <memory>
#include <string>

namespace shardwise::test {

/// Counts the products of matrices that all threads compute while it lives. One at a time.
class CountingProducts {
 public:
  CountingProducts() {
    count_ = 0;
    handle_ = at::addGlobalCallback(
        at::RecordFunctionCallback([](const at::RecordFunction& call) -> std::unique_ptr<at::ObserverContext> {
          const std::string name = call.name();
          if (name == "aten::mm" || name == "aten::addmm") ++count_;
          return nullptr;
        }));
  }
  CountingProducts(const CountingProducts&) = delete;
  CountingProducts& operator=(const CountingProducts&) = delete;
  ~CountingProducts() {
    at::removeCallback(handle_);
  }
  int count() const {
    return count_;
  }

 private:
  static inline std::atomic<int> count_ = 0;
  at::CallbackHandle handle_;
};

} // namespace shardwise::test
