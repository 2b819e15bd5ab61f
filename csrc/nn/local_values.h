#pragma once

#include "nn/touch.h"

namespace shardwise::nn {

/// Values that were computed from this rank's shards of gradients alone, and are others on each rank: norms, dot
/// products, all gradients as one vector. torch::nn::utils::clip_grad_norm_ and torch::optim::LBFGS compute with them
/// as if they were the whole model's. Whoever writes to shards or their gradients asks whether one is among the
/// arguments.
///
/// Followed through operations, until a collective gets the value, or it is read as a number of the language.
class LocalValues {
 public:
  /// For the results of an operation that ran; `local` is the most of what its arguments were.
  static void follow(const c10::OperatorHandle& operation, Local local, c10::ArrayRef<c10::IValue> results);
  /// Ranks exchange the arguments.
  static void forget(c10::ArrayRef<c10::IValue> arguments);

 private:
  class Followed;
};

} // namespace shardwise::nn
