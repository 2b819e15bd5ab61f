#pragma once

#include "split/split_parameter.h"

#include <ATen/core/Tensor.h>

namespace shardwise::tensor_parallel {

/// A piece of a weight, and what it is of.
struct Weight {
  at::Tensor tensor;
  split::SplitView view;
};

/// A linear layer on all ranks, whose weight is [outputs, inputs]. The bias is undefined, whole, or a piece of the same
/// outputs; `bias_view` says what it is a piece of, if it is one. `operation` is for errors.
at::Tensor linear(
    const at::Tensor& input, const Weight& weight, const at::Tensor& bias, const split::SplitView* bias_view,
    const std::string& operation);

struct EmbeddingSettings {
  int64_t padding_idx = -1;
  bool scale_grad_by_freq = false;
  bool sparse = false;
};

/// An embedding on all ranks.
at::Tensor embedding(const Weight& weight, const at::Tensor& indices, const EmbeddingSettings& settings);

/// What is added to the outputs of colwise(): the bias that is a piece of that, or all of it where outputs are
/// gathered.
at::Tensor bias_of_outputs(const at::Tensor& bias, const split::SplitView& view);

/// "shardwise: rank 1: aten::mm: 'up.weight', of which this rank has [3, 8] of [6, 8] along axis 'tp', "
std::string about(const std::string& operation, const split::SplitParameter& parameter);

/// From now on operations that read a piece of a parameter work on all ranks along its axis together: linear, addmm, mm
/// and matmul with the weight or its transpose, and embedding. Views and copies of a piece are pieces. Any other
/// operation is an Error under autograd; elsewhere a piece is a tensor like any other, except that no product or
/// convolution may read it.
void watch_pieces();

} // namespace shardwise::tensor_parallel
