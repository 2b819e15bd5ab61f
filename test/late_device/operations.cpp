// The operations that deal with tensors themselves rather than with what is in them, and those for which torch asks a
// device of its own kind.
#include "late.h"

#include "tensors.h"

#include <ATen/EmptyTensor.h>
#include <ATen/native/Resize.h>
#include <ATen/native/transformers/sdp_utils_cpp.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/is_set_to_native.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DeviceGuard.h>

namespace late {

void resize_storage(const c10::Storage& storage, size_t size) {
  const auto device = storage.device();
  const c10::DeviceGuard guard(device);
  auto memory = c10::GetAllocator(c10::kPrivateUse1)->allocate(size);
  const auto kept = std::min(size, storage.nbytes());
  if (kept > 0 && storage.data() != nullptr) {
    const auto from = reinterpret_cast<uintptr_t>(storage.data());
    const auto to = reinterpret_cast<uintptr_t>(memory.get());
    Device::of(device).issue(
        current_stream(device.index()).id(), "resize", {{from, from + kept, false}, {to, to + kept, true}},
        [from = for_worker_in_device(from), to = for_worker_in_device(to), kept] {
          std::memcpy(reinterpret_cast<void*>(to), reinterpret_cast<const void*>(from), kept);
        });
  }
  storage.set_data_ptr_noswap(std::move(memory));
  storage.unsafeGetStorageImpl()->set_nbytes(size);
}

namespace {

c10::Device device_of(const std::optional<at::Device>& device) {
  const auto index = device && device->has_index() ? device->index() : static_cast<c10::DeviceIndex>(current_device());
  return {c10::kPrivateUse1, index};
}

constexpr c10::DispatchKeySet kKeys(c10::DispatchKey::PrivateUse1);

at::Tensor empty(
    at::IntArrayRef sizes, std::optional<at::ScalarType> dtype, std::optional<at::Layout> layout,
    std::optional<at::Device> device, std::optional<bool> pinned, std::optional<at::MemoryFormat> format) {
  TORCH_CHECK(!layout || *layout == at::kStrided, "late device: there are only strided tensors");
  TORCH_CHECK(!pinned.value_or(false), "Only dense CPU tensors can be pinned");
  const c10::DeviceGuard guard(device_of(device));
  return at::detail::empty_generic(
      sizes, c10::GetAllocator(c10::kPrivateUse1), kKeys, c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(
    at::IntArrayRef sizes, at::IntArrayRef strides, std::optional<at::ScalarType> dtype,
    std::optional<at::Layout> /*layout*/, std::optional<at::Device> device, std::optional<bool> /*pinned*/) {
  const c10::DeviceGuard guard(device_of(device));
  return at::detail::empty_strided_generic(
      sizes, strides, c10::GetAllocator(c10::kPrivateUse1), kKeys, c10::dtype_or_default(dtype));
}

void make_room(const at::Tensor& tensor) {
  const auto size = at::detail::computeStorageNbytes(
      tensor.sizes(), tensor.strides(), tensor.element_size(), static_cast<size_t>(tensor.storage_offset()));
  if (tensor.numel() > 0 && size > tensor.storage().nbytes()) resize_storage(tensor.storage(), size);
}

const at::Tensor& resize_(const at::Tensor& self, at::IntArrayRef sizes, std::optional<at::MemoryFormat> format) {
  if (self.sizes() == sizes) return self;
  auto* const tensor = self.unsafeGetTensorImpl();
  tensor->set_sizes_contiguous(sizes);
  if (format && *format != at::MemoryFormat::Preserve) tensor->empty_tensor_restride(*format);
  make_room(self);
  return self;
}

at::Tensor& set_storage(
    at::Tensor& self, at::Storage source, int64_t offset, at::IntArrayRef sizes, at::IntArrayRef strides) {
  auto* const tensor = self.unsafeGetTensorImpl();
  tensor->set_storage_keep_dtype(std::move(source));
  tensor->set_storage_offset(offset);
  strides.data() == nullptr || strides.empty() ? tensor->set_sizes_contiguous(sizes)
                                               : tensor->set_sizes_and_strides(sizes, strides);
  make_room(self);
  return self;
}

at::Tensor& set_empty(at::Tensor& self) {
  const at::Storage storage(
      at::Storage::use_byte_size_t(), 0, c10::DataPtr(nullptr, self.device()), c10::GetAllocator(c10::kPrivateUse1),
      true);
  return set_storage(self, storage, 0, {0}, {});
}

void record(at::Tensor& self, at::Stream stream) {
  const c10::impl::VirtualGuardImpl guard(c10::kPrivateUse1);
  guard.recordDataPtrOnStream(self.storage().data_ptr(), stream);
}

/// Attention by the operations that it is made of.
int64_t choose_attention(
    const at::Tensor& /*query*/, const at::Tensor& /*key*/, const at::Tensor& /*value*/,
    const std::optional<at::Tensor>& /*mask*/, double /*dropout*/, bool /*causal*/, std::optional<double> /*scale*/,
    bool /*gqa*/) {
  return static_cast<int64_t>(sdp::SDPBackend::math);
}

/// The CPU's draws from its own generator, whenever it runs.
std::tuple<at::Tensor, at::Tensor> native_dropout(const at::Tensor& input, double p, std::optional<bool> train) {
  if (!train.value_or(true) || p == 0) return {input.clone(), at::ones_like(input, at::kBool)};
  const auto mask = at::empty_like(input, at::kBool).bernoulli_(1 - p);
  return {input.mul(mask).mul(p == 1 ? 0.0 : 1 / (1 - p)), mask};
}

// Else torch does not let a module's parameters move to a private device.
bool may_take_the_place_of(const at::Tensor& self, const at::Tensor& other) {
  return self.layout() == at::kStrided && other.layout() == at::kStrided;
}

} // namespace

void register_operations(torch::Library& library) {
  library.impl("empty.memory_format", &empty);
  library.impl("empty_strided", &empty_strided);
  library.impl("as_strided", &at::native::as_strided_tensorimpl);
  library.impl("view", &at::native::view);
  library.impl("_reshape_alias", &at::native::_reshape_alias);
  library.impl("unfold", &at::native::unfold);
  library.impl("view_as_real", &at::native::view_as_real);
  library.impl("view_as_complex", &at::native::view_as_complex);
  library.impl("resize_", &resize_);
  library.impl("set_.source_Storage_storage_offset", &set_storage);
  library.impl("set_.source_Storage", &at::native::set_);
  library.impl("set_.source_Tensor", &at::native::set_tensor_);
  library.impl("set_", &set_empty);
  library.impl("record_stream", &record);
  library.impl("is_set_to", &at::native::is_set_to);
  library.impl("native_dropout", &native_dropout);
  library.impl("_has_compatible_shallow_copy_type", &may_take_the_place_of);
  library.impl("_fused_sdp_choice", &choose_attention);
}

} // namespace late
