#pragma once

#include "split/split_parameter.h"

#include <ATen/core/Tensor.h>

#include <memory>
#include <vector>

namespace shardwise::nn {

using SplitAxes = std::vector<std::shared_ptr<const split::SplitAxis>>;

/// The axis along which parallelize() divided this tensor of an optimizer; null if it did not.
std::shared_ptr<const split::SplitAxis> split_axis_of(const at::Tensor& parameter);

/// Call this after a set_data() of which the touch trigger is not told, so that a piece stays a piece.
void keep_piece(const at::Tensor& parameter);

/// Adds it if it is not there.
void add_axis(SplitAxes& axes, const std::shared_ptr<const split::SplitAxis>& axis);

} // namespace shardwise::nn
