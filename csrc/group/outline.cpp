#include "group/outline.h"

namespace shardwise::group {
namespace {

at::ScalarType cast(at::ScalarType dtype, std::optional<at::ScalarType> to, at::ScalarType unset) {
  return at::isFloatingType(dtype) ? to.value_or(unset) : dtype;
}

int64_t alignment_of(at::ScalarType dtype) {
  return layout::alignment(static_cast<int64_t>(c10::elementSize(dtype)));
}

} // namespace

Outline::Outline(const Kind& kind, const Policy& policy)
    : layout(kind.whole ? Layout::replicate : policy.layout),
      world(layout == Layout::replicate ? 1 : policy.world),
      dtype(kind.dtype),
      full_dtype(
          layout == Layout::replicate ? dtype
                                      : cast(dtype, kind.full_dtype ? kind.full_dtype : policy.full_dtype, dtype)),
      sum_dtype(cast(dtype, policy.sum_dtype, kind.grad_dtype.value_or(dtype))) {}

layout::Shards Outline::lay_out(
    const std::vector<std::vector<int64_t>>& shapes, const std::vector<int64_t>& dims) const {
  return layout == Layout::flat ? layout::flat(shapes, world, alignment_of(dtype))
                                : layout::rows(shapes, dims, world, alignment_of(dtype));
}

layout::Shards Outline::lay_out_some(const layout::Shards& all, const std::vector<size_t>& chosen) const {
  return chosen.size() == all.cuts.size() ? all : layout::some_of(all, chosen, alignment_of(dtype));
}

} // namespace shardwise::group
