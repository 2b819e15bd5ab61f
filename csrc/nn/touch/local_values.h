#pragma once

#include "nn/touch/touch.h"

namespace shardwise::nn {

/// Follows what an operation computes from this rank's shards or their gradients alone, and what is computed from that:
/// norms, means, products, masks. It differs between ranks where it would not on one, and a write of it to shards or
/// their gradients is refused. torch::nn::utils::clip_grad_norm_ and torch::optim::LBFGS compute so.
///
/// Values are followed until a collective gets them, or the program reads them as plain numbers.
class LocalValues {
 public:
  /// `tensor`, which comes from there, is among the arguments of the operation, which is about to run.
  void add(
      const c10::OperatorHandle& operation, c10::ArrayRef<c10::IValue> arguments, const Origin& origin,
      const at::Tensor& tensor);
  /// The highest Local among the arguments.
  Local highest() const {
    return highest_;
  }
  /// The operation gave these results.
  void follow(const c10::OperatorHandle& operation, c10::ArrayRef<c10::IValue> results) const;
  /// The operation is a collective: the ranks exchange its arguments.
  void forget(c10::ArrayRef<c10::IValue> arguments);
  /// The tensor is followed no more.
  static void forget(const at::Tensor& tensor);

 private:
  Local local_of(const at::Tensor& result) const;

  Local highest_ = Local::no;
  /// Whether the operation computes from several elements.
  bool mixes_ = false;
  /// Whether autograd follows arguments that do not come from shards.
  bool others_train_ = false;
  /// The size of a cut dimension, and its number from the last one on, which broadcasting keeps.
  std::optional<int64_t> size_;
  int64_t from_last_ = 0;
};

} // namespace shardwise::nn
