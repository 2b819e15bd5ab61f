#include "tensors.h"

#include "pinned.h"

#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>

namespace late {
namespace {

/// More pieces than this count as one.
constexpr int64_t kPieces = 1024;

uintptr_t address_of(const at::Tensor& tensor) {
  return reinterpret_cast<uintptr_t>(tensor.const_data_ptr());
}

/// Adds `tensor` from its dimension `dim` on; the first `dim` indices made the address.
void add(const at::Tensor& tensor, int64_t dim, uintptr_t address, bool writes, std::vector<Use>& uses) {
  const auto item = static_cast<int64_t>(tensor.element_size());
  // What lies together from here on is one piece.
  int64_t together = item;
  int64_t inner = tensor.dim();
  while (inner > dim && (tensor.size(inner - 1) == 1 || tensor.stride(inner - 1) * item == together)) {
    together *= tensor.size(--inner);
  }
  if (inner == dim) {
    uses.push_back({address, address + static_cast<uintptr_t>(together), writes});
    return;
  }
  const auto step = tensor.stride(dim) * item;
  const auto count = step == 0 ? 1 : tensor.size(dim);
  for (int64_t k = 0; k < count; ++k) add(tensor, dim + 1, address + static_cast<uintptr_t>(k * step), writes, uses);
}

} // namespace

at::Tensor for_worker(const at::Tensor& tensor) {
  const auto options = tensor.options().device(at::kCPU);
  if (tensor.numel() == 0) return at::empty_strided(tensor.sizes(), tensor.strides(), options);
  const auto address = address_of(tensor);
  TORCH_CHECK(address != 0, "late device: an operation uses a tensor whose memory was freed");
  TORCH_CHECK(
      is_device_memory(address) == is_late(tensor), "late device: a tensor on ", tensor.device(),
      " has memory that is not of its device");
  const auto worker = is_device_memory(address) ? for_worker_in_device(address) : for_worker_in_pinned(address);
  const auto result = at::for_blob(reinterpret_cast<void*>(worker), tensor.sizes())
                          .strides(tensor.strides())
                          .options(options)
                          .target_device(at::kCPU)
                          .make_tensor();
  if (tensor.is_conj()) result._set_conj(true);
  if (tensor.is_neg()) result._set_neg(true);
  return result;
}

void add_uses(const at::Tensor& tensor, bool writes, std::vector<Use>& uses) {
  if (tensor.numel() == 0) return;
  int64_t pieces = 1;
  int64_t last = 0;
  for (int64_t dim = 0; dim < tensor.dim(); ++dim) {
    last += (tensor.size(dim) - 1) * tensor.stride(dim);
    if (dim + 1 < tensor.dim()) pieces *= tensor.size(dim);
  }
  const auto address = address_of(tensor);
  if (pieces <= kPieces) return add(tensor, 0, address, writes, uses);
  uses.push_back({address, address + static_cast<uintptr_t>(last + 1) * tensor.element_size(), writes});
}

void issue(const at::Tensor& on, const char* name, const std::vector<Use>& uses, std::function<void()> run) {
  const auto index = on.device().index();
  Device::of(index).issue(current_stream(index).id(), name, uses, std::move(run));
}

void synchronize(const at::Tensor& on, const char* what) {
  const auto index = on.device().index();
  Device::of(index).synchronize(current_stream(index).id(), what);
}

at::Tensor empty_like_on(const at::Tensor& model, const at::Device& device) {
  return at::empty_strided(model.sizes(), model.strides(), model.options().device(device));
}

} // namespace late
