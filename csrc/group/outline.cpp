#include "group/outline.h"

namespace shardwise::group {
namespace {

at::ScalarType cast(at::ScalarType dtype, std::optional<at::ScalarType> to, at::ScalarType unset) {
  return at::isFloatingType(dtype) ? to.value_or(unset) : dtype;
}

} // namespace

Outline::Outline(const Kind& kind, const Policy& policy)
    : layout_(kind.whole ? Layout::replicate : policy.layout),
      world_(layout_ == Layout::replicate ? 1 : policy.world),
      dtype_(kind.dtype),
      full_dtype_(
          layout_ == Layout::replicate ? dtype_
                                       : cast(dtype_, kind.full_dtype ? kind.full_dtype : policy.full_dtype, dtype_)),
      sum_dtype_(cast(dtype_, policy.sum_dtype, kind.grad_dtype.value_or(dtype_))) {}

int64_t Outline::alignment() const {
  return layout::alignment(static_cast<int64_t>(c10::elementSize(dtype_)));
}

layout::Shards Outline::lay_out(
    const std::vector<std::vector<int64_t>>& shapes, const std::vector<int64_t>& dims) const {
  return layout_ == Layout::flat ? layout::flat(shapes, world_, alignment())
                                 : layout::rows(shapes, dims, world_, alignment());
}

layout::Shards Outline::lay_out_some(const layout::Shards& all, const std::vector<size_t>& chosen) const {
  return chosen.size() == all.cuts.size() ? all : layout::some_of(all, chosen, alignment());
}

} // namespace shardwise::group
