// Device memory as torch allocates it: on the current stream of the current device.
#include "late.h"

#include "device.h"

#include <c10/core/Allocator.h>

namespace late {
namespace {

void give(void* address) {
  if (address == nullptr) return;
  Device::of(device_of(reinterpret_cast<uintptr_t>(address))).give(reinterpret_cast<uintptr_t>(address));
}

struct Allocator final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    const auto index = current_device();
    const c10::Device device(c10::kPrivateUse1, static_cast<c10::DeviceIndex>(index));
    if (size == 0) return {nullptr, device};
    void* place = reinterpret_cast<void*>(Device::of(index).take(size, current_stream(index).id()));
    return {place, place, &late::give, device};
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return &late::give;
  }
  void copy_data(void* /*to*/, const void* /*from*/, size_t /*count*/) const override {
    TORCH_CHECK(false, "late device: a storage of the device cannot be copied by the host");
  }
};

} // namespace

void register_allocator() {
  static Allocator allocator;
  c10::SetAllocator(c10::kPrivateUse1, &allocator);
}

} // namespace late
