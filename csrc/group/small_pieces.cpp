#include "group/small_pieces.h"

#include <ATen/OpMathType.h>
#include <c10/util/accumulate.h>

#include <cstring>
#include <type_traits>

namespace shardwise::group {
namespace {

/// Elements: torch's kernels begin to use several threads here.
constexpr int64_t kSmall = 32768;

char* element(const at::Tensor& tensor, int64_t index) {
  return static_cast<char*>(tensor.mutable_data_ptr()) + index * static_cast<int64_t>(tensor.itemsize());
}

} // namespace

bool is_small(const at::Tensor& tensor) {
  return tensor.is_cpu() && tensor.numel() <= kSmall;
}

Runs runs_of(const layout::Cut& cut, int64_t rank) {
  const auto dim = static_cast<size_t>(cut.dim);
  const auto row = c10::multiply_integers(cut.shape.begin() + cut.dim + 1, cut.shape.end());
  return {
      .count = c10::multiply_integers(cut.shape.begin(), cut.shape.begin() + cut.dim),
      .length = cut.length(rank) * row,
      .stride = cut.shape[dim] * row,
      .start = cut.starts[static_cast<size_t>(rank)] * row};
}

void put_runs(const at::Tensor& whole, const Runs& runs, const at::Tensor& part, int64_t offset) {
  const auto bytes = static_cast<size_t>(runs.length) * whole.itemsize();
  for (int64_t i = 0; i < runs.count; ++i) {
    std::memcpy(element(whole, runs.start + i * runs.stride), element(part, offset + i * runs.length), bytes);
  }
}

namespace {

/// Calls act(Number()) for the floating-point dtypes that there are kernels for.
template <typename Act>
bool with_number(at::ScalarType dtype, const Act& act) {
  if (dtype == at::kFloat) return act(float());
  if (dtype == at::kDouble) return act(double());
  if (dtype == at::kBFloat16) return act(at::BFloat16());
  if (dtype == at::kHalf) return act(at::Half());
  return false;
}

} // namespace

bool scale_runs(const at::Tensor& whole, const Runs& runs, double scale, const at::Tensor& part, int64_t offset) {
  const auto scaled = [&]<typename From, typename To>(From, To) {
    using Wide = std::common_type_t<at::opmath_type<From>, at::opmath_type<To>>;
    const auto factor = static_cast<Wide>(scale);
    for (int64_t i = 0; i < runs.count; ++i) {
      const auto* from = whole.const_data_ptr<From>() + runs.start + i * runs.stride;
      auto* to = part.mutable_data_ptr<To>() + offset + i * runs.length;
      for (int64_t k = 0; k < runs.length; ++k) to[k] = static_cast<To>(static_cast<Wide>(from[k]) * factor);
    }
    return true;
  };
  return with_number(whole.scalar_type(), [&](auto from) {
    return with_number(part.scalar_type(), [&](auto to) { return scaled(from, to); });
  });
}

bool put_flags(const std::vector<bool>& flags, const at::Tensor& vector, int64_t offset) {
  if (vector.scalar_type() != at::kFloat) return false;
  auto* to = vector.mutable_data_ptr<float>() + offset;
  for (const bool flag : flags) *to++ = flag ? 1.0F : 0.0F;
  return true;
}

at::Tensor view_of(const at::Tensor& buffer, at::IntArrayRef sizes, at::IntArrayRef strides, int64_t offset) {
  auto view = at::detail::make_tensor<c10::TensorImpl>(
      c10::TensorImpl::VIEW, c10::Storage(buffer.storage()), buffer.key_set(), buffer.dtype());
  view.unsafeGetTensorImpl()->set_storage_offset(offset);
  view.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides);
  return view;
}

} // namespace shardwise::group
