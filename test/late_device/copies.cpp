// Copies within a device, between devices, and between a device and the host.
#include "late.h"

#include "pinned.h"
#include "tensors.h"

namespace late {
namespace {

bool is_pinned(const at::Tensor& tensor) {
  return tensor.numel() > 0 && late::is_pinned(reinterpret_cast<uintptr_t>(tensor.const_data_ptr()));
}

void on_device(const at::Tensor& to, const at::Tensor& from) {
  std::vector<Use> uses;
  add_uses(from, false, uses);
  add_uses(to, true, uses);
  issue(to, "copy", uses, [to = for_worker(to), from = for_worker(from)] { to.copy_(from); });
}

/// What the host gives is read at once, unless it is pinned and the copy need not be waited for.
void from_host(const at::Tensor& to, const at::Tensor& from, bool non_blocking) {
  const bool is_late = non_blocking && is_pinned(from);
  std::vector<Use> uses;
  if (is_late) add_uses(from, false, uses);
  add_uses(to, true, uses);
  const auto read = is_late ? for_worker(from) : from.clone();
  issue(to, "copy from the host", uses, [to = for_worker(to), read] { to.copy_(read); });
  if (!non_blocking) synchronize(to, "wait for a copy to the device");
}

void to_host(const at::Tensor& to, const at::Tensor& from, bool non_blocking) {
  const bool is_late = non_blocking && is_pinned(to);
  std::vector<Use> uses;
  add_uses(from, false, uses);
  if (is_late) add_uses(to, true, uses);
  issue(from, "copy to the host", uses, [to = is_late ? for_worker(to) : to, from = for_worker(from)] {
    to.copy_(from);
  });
  if (!is_late) synchronize(from, "wait for a copy to the host");
}

at::Tensor& copy_(at::Tensor& to, const at::Tensor& source, bool non_blocking) {
  if (to.is_same(source)) return to;
  const auto from = source.sizes() == to.sizes() ? source : source.expand_as(to);
  if (to.numel() == 0) return to;
  if (!is_late(to)) {
    to_host(to, from, non_blocking);
  } else if (!is_late(from)) {
    TORCH_CHECK(from.device().is_cpu(), "late device: copies from ", from.device(), " are not known");
    from_host(to, from, non_blocking);
  } else if (to.device() == from.device()) {
    on_device(to, from);
  } else {
    from_host(to, from.cpu(), non_blocking);
  }
  return to;
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  auto target = to;
  return copy_(target, from, non_blocking);
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  to.resize_(from.sizes());
  return copy_from(from, to, false);
}

at::Scalar local_scalar_dense(const at::Tensor& tensor) {
  return tensor.cpu().item();
}

} // namespace

void register_copies(torch::Library& library) {
  library.impl("copy_", &copy_);
  library.impl("_copy_from", &copy_from);
  library.impl("_copy_from_and_resize", &copy_from_and_resize);
  library.impl("_local_scalar_dense", &local_scalar_dense);
}

} // namespace late
