#include "stream_wire.h"

#include <ATen/DeviceAccelerator.h>
#include <ATen/cuda/Sleep.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

namespace {

// The device's clock changes with what it does, so it is measured and not asked.
double measure_cycles_per_second(c10::Stream stream) {
  constexpr int64_t kCycles = 100'000'000;
  const c10::StreamGuard on(stream);
  at::cuda::sleep(kCycles);
  stream.synchronize();
  const auto begin = std::chrono::steady_clock::now();
  at::cuda::sleep(kCycles);
  stream.synchronize();
  return kCycles / Wire::Seconds(std::chrono::steady_clock::now() - begin).count();
}

} // namespace

StreamWire::StreamWire(c10::Device device)
    : link_(c10::impl::VirtualGuardImpl(device.type()).getNewStream(device)),
      cycles_per_second_(measure_cycles_per_second(link_)) {}

c10::intrusive_ptr<c10d::Work> StreamWire::carry(const Start& start, std::vector<at::Tensor> results, Seconds takes) {
  const auto device = link_.device();
  c10::Event ready(device.type());
  ready.record(at::accelerator::getCurrentStream(device.index()));
  ready.block(link_);
  auto work = c10::make_intrusive<FutureWork>(std::vector<c10::Device>{device});
  const c10::StreamGuard on(link_);
  start()->wait();
  at::cuda::sleep(static_cast<int64_t>(takes.count() * cycles_per_second_));
  work->end(results, nullptr);
  return work;
}
