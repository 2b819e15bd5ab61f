#pragma once

#include "comm/collectives/collectives.h"
#include "engine/front_end.h"
#include "split/split_parameter.h"

#include <map>
#include <vector>

namespace shardwise::nn {

/// Tensors of a dtype on a device.
struct SameKind {
  at::Device device;
  at::ScalarType dtype;
  std::vector<at::Tensor> values;
};
/// Adds it to those that are alike.
void add_to_same_kind(std::vector<SameKind>& all, const at::Tensor& values);

/// The norm of a vector that comes in parts, some of them on other ranks. It stays on its device, so the host waits for
/// nothing.
///
/// Until value() it is a sum of p-th powers, or for infinity a maximum. A count of elements that are not a number is
/// separate, since a maximum may lose them.
class GradientNorm {
 public:
  /// The result will be on the device `home`.
  GradientNorm(double order, at::Device home);

  /// `weight`: this rank's share of it, if other ranks add shares of the same gradient.
  void add(const at::Tensor& gradient, double weight);
  /// Adds up what this rank has: in a few operations for all gradients of a dtype and a device.
  void finish();
  /// Over the ranks that hold the shards of the unit.
  void reduce(engine::Unit& unit);
  /// Over the ranks along an axis of parallelize().
  void reduce(const split::SplitAxis& axis);
  /// Over all ranks of the unit's mesh.
  void reduce_to_all(engine::Unit& unit);
  GradientNorm& operator+=(const GradientNorm& other);
  /// A tensor of one double.
  at::Tensor value() const;

 private:
  bool is_maximum() const;
  void add_up(const at::Tensor& power, const at::Tensor& is_nan);
  void reduce(const std::vector<comm::Collectives>& ranks, at::Device device, Counters& counters);

  double order_;
  at::Device home_;
  /// By their weight.
  std::map<double, std::vector<SameKind>> waiting_;
  at::Tensor power_;
  /// Above 0 if anything is not a number.
  at::Tensor is_nan_;
};

/// The tensor on another device. Only a copy to the host's memory is waited for.
at::Tensor moved_to(const at::Tensor& tensor, at::Device device);

} // namespace shardwise::nn
