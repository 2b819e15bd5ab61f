#pragma once

#include "split/split_parameter.h"

#include <ATen/core/Tensor.h>

#include <memory>
#include <vector>

namespace shardwise::nn {

using SplitAxes = std::vector<std::shared_ptr<const split::SplitAxis>>;

/// The axis along which parallelize() divided the parameter that an optimizer sees as this tensor; null if it did not.
std::shared_ptr<const split::SplitAxis> split_axis_of(const at::Tensor& parameter);

/// To be called when a parameter got other memory by a set_data() that the touch trigger does not see: a piece stays
/// one.
void keep_piece(const at::Tensor& parameter);

/// Adds it if it is not there.
void add_axis(SplitAxes& axes, const std::shared_ptr<const split::SplitAxis>& axis);

} // namespace shardwise::nn
