#pragma once

#include <torch/nn/module.h>

#include <memory>
#include <string>
#include <vector>

namespace shardwise::nn {

/// Notices parameters that were registered with wrapped modules later: nobody would average their gradients. Keeps no
/// module alive.
class LaterParameters {
 public:
  /// Made when the modules have been wrapped and have hooks. What is in no unit now was left out on purpose.
  LaterParameters(const std::vector<torch::nn::Module*>& modules, std::string function);

  /// Raises Error if there is one that needs a gradient and has no unit.
  void refuse(int64_t rank);

 private:
  using Parameter = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;
  struct Wrapped {
    torch::nn::Module* module;
    std::weak_ptr<const void> life;
    /// Stands for its parameters, and which of them are trained, as they were when all was well.
    uint64_t fingerprint = 0;
  };

  std::vector<Wrapped> wrapped_;
  std::string function_;
  /// Holds their addresses, which no other tensor can have meanwhile.
  std::vector<Parameter> left_out_;
};

} // namespace shardwise::nn
