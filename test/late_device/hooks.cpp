// What torch asks an accelerator for.
#include "late.h"

#include "device.h"
#include "generator.h"
#include "pinned.h"

#include <ATen/detail/PrivateUse1HooksInterface.h>

namespace late {

void resize_storage(const c10::Storage& storage, size_t size);

namespace {

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override {
    return true;
  }
  bool isAvailable() const override {
    return true;
  }
  bool hasPrimaryContext(c10::DeviceIndex /*index*/) const override {
    return true;
  }
  c10::DeviceIndex deviceCount() const override {
    return kDevices;
  }
  void setCurrentDevice(c10::DeviceIndex index) const override {
    set_current_device(index);
  }
  c10::DeviceIndex getCurrentDevice() const override {
    return static_cast<c10::DeviceIndex>(current_device());
  }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override {
    const auto before = getCurrentDevice();
    set_current_device(index);
    return before;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override {
    return exchangeDevice(index);
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex index) const override {
    return default_generator(index);
  }
  at::Generator getNewGenerator(c10::DeviceIndex index) const override {
    return new_generator(index);
  }
  at::Device getDeviceFromPtr(void* data) const override {
    return {c10::kPrivateUse1, static_cast<c10::DeviceIndex>(device_of(reinterpret_cast<uintptr_t>(data)))};
  }
  bool isPinnedPtr(const void* data) const override {
    return is_pinned(reinterpret_cast<uintptr_t>(data));
  }
  at::Allocator* getPinnedMemoryAllocator() const override {
    return pinned_allocator();
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const override {
    resize_storage(storage, size);
  }
};

} // namespace

void register_hooks() {
  at::RegisterPrivateUse1HooksInterface(new Hooks);
}

} // namespace late
