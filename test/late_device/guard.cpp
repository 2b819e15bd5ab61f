// The device and its streams as torch's guards, events and autograd use them.
#include "late.h"

#include "device.h"
#include "faults.h"

#include <c10/core/Allocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/util/StringUtil.h>

namespace late {
namespace {

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override {
    return c10::kPrivateUse1;
  }
  c10::Device exchangeDevice(c10::Device device) const override {
    const auto before = getDevice();
    setDevice(device);
    return before;
  }
  c10::Device getDevice() const override {
    return {c10::kPrivateUse1, static_cast<c10::DeviceIndex>(current_device())};
  }
  void setDevice(c10::Device device) const override {
    if (device.has_index()) set_current_device(device.index());
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.has_index()) set_current_device(device.index());
  }
  c10::DeviceIndex deviceCount() const noexcept override {
    return kDevices;
  }

  c10::Stream getStream(c10::Device device) const override {
    return current_stream(index_of(device));
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return c10::Stream(
        c10::Stream::DEFAULT, c10::Device(c10::kPrivateUse1, static_cast<c10::DeviceIndex>(index_of(device))));
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool /*high_priority*/) const override {
    return Device::of(index_of(device)).stream_of_pool();
  }
  c10::Stream getNewStream(c10::Device device, int /*priority*/) const override {
    return Device::of(index_of(device)).new_stream();
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    return exchange_current_stream(stream);
  }
  // Newer torches ask this; older ones have no such thing.
  bool isStreamCapturing(const c10::Stream& stream) const {
    return Capturing::on(stream.device_index()) != 0;
  }
  bool queryStream(const c10::Stream& stream) const override {
    return of(stream).is_idle(stream.id());
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    of(stream).synchronize(stream.id(), "wait for a stream");
  }
  void synchronizeDevice(c10::DeviceIndex device) const override {
    Device::of(device).synchronize_all();
  }

  // An event is made when it is first recorded.
  void record(
      void** event, const c10::Stream& stream, c10::DeviceIndex /*device*/, c10::EventFlag /*flag*/) const override {
    if (*event == nullptr) *event = new Recorded;
    const auto device = stream.device_index();
    *static_cast<Recorded*>(*event) = {device, Capturing::on(device), of(stream).record(stream.id())};
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event == nullptr) return;
    const auto& recorded = as_recorded(event);
    if (recorded.capture != Capturing::on(stream.device_index())) {
      report(c10::str(
          "a stream of capture ", Capturing::on(stream.device_index()), " was told to wait for an event of capture ",
          recorded.capture, " (0 is none)."));
    }
    of(stream).wait(stream.id(), recorded.event);
  }
  bool queryEvent(void* event) const override {
    return event == nullptr || asked_by_host(event).query(as_recorded(event).event);
  }
  void synchronizeEvent(void* event) const override {
    if (event != nullptr) asked_by_host(event).synchronize(as_recorded(event).event, "wait for an event");
  }
  void destroyEvent(void* event, c10::DeviceIndex /*device*/) const noexcept override {
    delete static_cast<Recorded*>(event);
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    // As CUDA's allocator: what another one gave is not its business, and it says nothing.
    if (data.get() == nullptr || data.get_deleter() != c10::GetAllocator(c10::kPrivateUse1)->raw_deleter()) return;
    of(stream).record_stream(reinterpret_cast<uintptr_t>(data.get_context()), stream.id());
  }

 private:
  struct Recorded {
    int device = 0;
    uint64_t capture = 0;
    Device::Event event = {};
  };
  /// The device of an event that the host asks or waits for. CUDA refuses one of a graph; and a thread whose current
  /// device is another one takes memory there for nothing.
  static Device& asked_by_host(void* event) {
    const auto& recorded = as_recorded(event);
    if (recorded.capture != 0) report("the host asked for an event that was recorded while a graph was captured.");
    if (recorded.device != current_device()) {
      report(c10::str(
          "the host asked for an event of device ", recorded.device, " while device ", current_device(),
          " was the current one."));
    }
    return Device::of(recorded.device);
  }
  static const Recorded& as_recorded(void* event) {
    return *static_cast<Recorded*>(event);
  }
  static Device& of(const c10::Stream& stream) {
    return Device::of(stream.device());
  }
  static int index_of(c10::Device device) {
    return device.has_index() ? device.index() : current_device();
  }
};

} // namespace

void register_guard() {
  static const Guard guard;
  c10::impl::device_guard_impl_registry[static_cast<size_t>(c10::kPrivateUse1)].store(&guard);
}

} // namespace late
