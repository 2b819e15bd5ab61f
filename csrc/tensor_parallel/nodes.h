#pragma once

#include "split/exchange.h"

#include <ATen/core/Tensor.h>

#include <functional>
#include <utility>

namespace shardwise::tensor_parallel {

using split::Exchange;

/// While one lives, operations of this thread on pieces are what they say, and nothing is exchanged.
class NoExchangeGuard {
 public:
  NoExchangeGuard() : before_(std::exchange(active_, true)) {}
  NoExchangeGuard(const NoExchangeGuard&) = delete;
  NoExchangeGuard& operator=(const NoExchangeGuard&) = delete;
  ~NoExchangeGuard() {
    active_ = before_;
  }
  static bool is_active() {
    return active_;
  }

 private:
  static inline thread_local bool active_ = false;
  bool before_;
};

/// What becomes of the gradient of the input of split_linear(), to which each rank's piece contributes.
enum class InputGradient : uint8_t {
  /// Each rank has what is of its own input.
  own,
  /// It is added up over the ranks.
  sum,
  /// The input was gathered from parts along the sequence_dim: each rank gets its part of the sum.
  scatter
};

/// input * weight^T + bias, where `weight`, [outputs, inputs], is a piece, and the bias undefined or the same outputs'
/// piece. In backward the gradient of the input travels while that of the weight is computed.
at::Tensor split_linear(
    const at::Tensor& input, const at::Tensor& weight, const at::Tensor& bias, const Exchange& exchange,
    InputGradient gradient, int64_t sequence_dim = 0);

/// `output`, which was made from `input` out of autograd's sight, with a gradient that is `backward` of its own.
at::Tensor with_backward(
    const at::Tensor& input, at::Tensor output, const char* name,
    std::function<at::Tensor(const at::Tensor& gradient)> backward);

/// A tensor as autocast would pass it to a matrix product.
at::Tensor as_autocast(const at::Tensor& tensor);

} // namespace shardwise::tensor_parallel
