#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/DimVector.h>
#include <c10/util/FunctionRef.h>

#include <vector>

namespace shardwise::group {

class Parameter;

/// The result of a sum of gradients: a vector, and views of it that are published as means. Vector and views are used
/// again, step after step, once there is no other reference to any of them.
class Sum {
 public:
  const at::Tensor& vector() const {
    return vector_;
  }
  /// Whether the next sum may be written here. `parameters` are those of the views, in the same order.
  bool is_free(const std::vector<Parameter*>& parameters) const;
  /// Whether it has memory that is cheap to give back and take again: an arena's, or that of a device's allocator.
  bool may_rest() const;
  /// If so, and if free, gives the memory back until wake().
  void rest(const std::vector<Parameter*>& parameters);
  void wake();
  /// Switches to another vector. Other references to the old one stay valid.
  void renew(at::Tensor vector);
  /// The view for parameter number `index`: the same tensor as last time, unless the program changed it. `strides` is
  /// called to make a new one.
  const at::Tensor& view(
      size_t index, at::IntArrayRef sizes, int64_t offset, c10::function_ref<c10::DimVector()> strides);

 private:
  struct View {
    at::Tensor tensor;
    c10::DimVector strides;
  };
  bool is_as_made(const View& view, at::IntArrayRef sizes, int64_t offset) const;

  at::Tensor vector_;
  bool rests_ = false;
  std::vector<View> views_;
};

} // namespace shardwise::group
