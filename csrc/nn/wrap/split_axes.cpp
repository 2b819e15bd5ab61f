#include "nn/wrap/split_axes.h"

#include "engine/front_end.h"
#include "nn/touch/touch.h"

#include <algorithm>

namespace shardwise::nn {

std::shared_ptr<const split::SplitAxis> split_axis_of(const at::Tensor& parameter) {
  if (!split::any_split()) return nullptr;
  auto found = split::split_parameter_of(parameter);
  const auto unit = found ? nullptr : engine::unit_of_shard(parameter);
  if (unit) found = split::split_parameter_of(unit->parameter_of_shard(parameter)->leaf());
  return found ? found->axis : nullptr;
}

void keep_piece(const at::Tensor& parameter) {
  if (!split::split_parameter_of(parameter)) return;
  split::split_moved();
  add_touch_key(parameter);
}

void add_axis(SplitAxes& axes, const std::shared_ptr<const split::SplitAxis>& axis) {
  if (!axis) return;
  const auto same = [&](const auto& other) { return other->ranks == axis->ranks; };
  if (std::none_of(axes.begin(), axes.end(), same)) axes.push_back(axis);
}

} // namespace shardwise::nn
