#pragma once

#include "nn/touch/touch.h"

namespace shardwise::nn {

/// Follows values that were computed from this rank's shards or their gradients alone, and so differ between ranks:
/// norms, means, dot products, all gradients as one vector. torch::nn::utils::clip_grad_norm_ and torch::optim::LBFGS
/// compute with them as if they were the whole model's. A write to shards or their gradients asks whether such a value
/// is among the arguments.
///
/// They are followed through operations until a collective gets the value, or the program reads it as a plain number.
///
/// To be called with the results of an operation. `local` is the highest Local among its arguments.
void follow_local(const c10::OperatorHandle& operation, Local local, c10::ArrayRef<c10::IValue> results);
/// The ranks exchange these arguments, which are followed no more.
void forget_local(c10::ArrayRef<c10::IValue> arguments);

} // namespace shardwise::nn
