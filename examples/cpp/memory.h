#pragma once

#include "records.h"
#include "tensor_memory.h"

#include <shardwise/shared_memory.h>

#include <c10/core/CachingDeviceAllocator.h>
#include <torch/torch.h>

#include <filesystem>
#include <fstream>
#include <unordered_set>
#include <vector>

/// What this rank holds of tensors, in MiB, between two steps: all of it, the parts that are known by name, and the
/// most that there was in the step before. Measured: by their memory, and by the allocator.
struct Memory {
  double parameters = 0;
  double gradients = 0;
  double optimizer = 0;
  double all = 0;
  double peak = 0;

  /// Before the first tensor.
  static void watch() {
    TensorMemory::watch();
    shardwise::set_shared_memory_listener(&TensorMemory::add);
  }
  static void begin_step(torch::Device device) {
    device.is_cpu() ? TensorMemory::forget_peak()
                    : c10::getDeviceAllocator(device.type())->resetPeakStats(device.index());
  }
  static Memory after_step(const torch::nn::Module& model, torch::optim::AdamW& optimizer, torch::Device device) {
    std::vector<torch::Tensor> gradients;
    std::vector<torch::Tensor> states;
    for (const auto& parameter : model.parameters()) gradients.push_back(parameter.grad());
    for (const auto& entry : optimizer.state()) {
      const auto& state = static_cast<const torch::optim::AdamWParamState&>(*entry.second);
      states.insert(states.end(), {state.exp_avg(), state.exp_avg_sq()});
    }
    Memory memory{
        .parameters = mib_of(model.parameters()), .gradients = mib_of(gradients), .optimizer = mib_of(states)};
    if (device.is_cpu()) {
      memory.all = static_cast<double>(TensorMemory::bytes()) / mebibyte;
      memory.peak = static_cast<double>(TensorMemory::peak()) / mebibyte;
    } else {
      const auto stats = c10::getDeviceAllocator(device.type())->getDeviceStats(device.index()).allocated_bytes.front();
      memory.all = static_cast<double>(stats.current) / mebibyte;
      memory.peak = static_cast<double>(stats.peak) / mebibyte;
    }
    return memory;
  }

  void write(const std::filesystem::path& file) const {
    std::ofstream(file) << std::setprecision(9) << "{\"parameters\": " << parameters << ", \"gradients\": " << gradients
                        << ", \"optimizer\": " << optimizer << ", \"all\": " << all << ", \"peak\": " << peak << "}\n";
  }

 private:
  /// Tensors that share memory count once, with all of it.
  static double mib_of(const std::vector<torch::Tensor>& tensors) {
    std::unordered_set<const c10::StorageImpl*> seen;
    double bytes = 0;
    for (const auto& tensor : tensors) {
      if (!tensor.defined() || !seen.insert(tensor.storage().unsafeGetStorageImpl()).second) continue;
      bytes += static_cast<double>(tensor.storage().nbytes());
    }
    return bytes / mebibyte;
  }
};
