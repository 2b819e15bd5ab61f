#pragma once

#include <c10/core/CPUAllocator.h>

#include <atomic>
#include <cstdint>
#include <cstring>

/// Counts the bytes of all tensors on the CPU, by standing before torch's allocator.
class TensorMemory {
 public:
  /// Before the first tensor: what was made earlier is not counted. Again does nothing.
  static void watch() {
    static auto* allocator = new Allocator(c10::GetCPUAllocator());
    c10::SetCPUAllocator(allocator, /*priority=*/100);
  }

  static int64_t bytes() {
    return counts().now;
  }
  /// The most since forget_peak().
  static int64_t peak() {
    return counts().peak;
  }
  static void forget_peak() {
    counts().peak = counts().now.load();
  }
  /// Pieces of memory allocated so far.
  static int64_t allocations() {
    return counts().allocations;
  }

  /// Of tensors that another allocator made, or freed.
  static void add(int64_t bytes) {
    const auto now = counts().now += bytes;
    auto peak = counts().peak.load();
    while (now > peak && !counts().peak.compare_exchange_weak(peak, now)) {
    }
  }

 private:
  struct Counts {
    std::atomic<int64_t> now = 0;
    std::atomic<int64_t> peak = 0;
    std::atomic<int64_t> allocations = 0;
  };

  static Counts& counts() {
    static Counts counts;
    return counts;
  }

  /// Some parts of torch ask that the pointer is all that is needed to free memory: the size stands before it.
  class Allocator : public c10::Allocator {
   public:
    explicit Allocator(c10::Allocator* torchs) : torchs_(torchs) {
      torchs_free() = torchs->raw_deleter();
    }
    at::DataPtr allocate(size_t size) override {
      const at::Device cpu(at::DeviceType::CPU);
      if (size == 0) return {nullptr, nullptr, &free, cpu};
      auto* block = static_cast<char*>(torchs_->raw_allocate(size + kBefore));
      const auto bytes = static_cast<int64_t>(size);
      std::memcpy(block, &bytes, sizeof bytes);
      add(bytes);
      ++counts().allocations;
      return {block + kBefore, block + kBefore, &free, cpu};
    }
    at::DeleterFnPtr raw_deleter() const override {
      return &free;
    }
    void copy_data(void* destination, const void* source, std::size_t count) const override {
      torchs_->copy_data(destination, source, count);
    }

   private:
    /// As torch aligns memory.
    static constexpr size_t kBefore = 64;

    static at::DeleterFnPtr& torchs_free() {
      static at::DeleterFnPtr function = nullptr;
      return function;
    }
    static void free(void* memory) {
      if (memory == nullptr) return;
      auto* block = static_cast<char*>(memory) - kBefore;
      int64_t bytes = 0;
      std::memcpy(&bytes, block, sizeof bytes);
      counts().now -= bytes;
      torchs_free()(block);
    }
    c10::Allocator* torchs_;
  };
};
