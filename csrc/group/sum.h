#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/FunctionRef.h>

#include <vector>

namespace shardwise::group {

class Parameter;

/// What comes out of a sum of gradients: a vector, and views of it, which are published as means. Vector and views are
/// used again, step after step, once nobody else has a hold on any of them.
class Sum {
 public:
  const at::Tensor& vector() const {
    return vector_;
  }
  /// Whether the next sum may be written here. `parameters` are those that views are of, in their order.
  bool is_free(const std::vector<Parameter*>& parameters) const;
  /// Lets go of what was, which whoever holds it keeps.
  void renew(at::Tensor vector);
  /// A view for parameter number `index`: the same tensor as last time, if nobody changed what it is. `strides` is
  /// called for a new one.
  const at::Tensor& view(
      size_t index, at::IntArrayRef sizes, int64_t offset, c10::function_ref<std::vector<int64_t>()> strides);

 private:
  struct View {
    at::Tensor tensor;
    std::vector<int64_t> strides;
  };
  bool is_as_made(const View& view, at::IntArrayRef sizes, int64_t offset) const;

  at::Tensor vector_;
  std::vector<View> views_;
};

} // namespace shardwise::group
