#include "nn/recompute/thread_state.h"

#include "base/compute_guard.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/DeviceAccelerator.h>

#include <mutex>
#include <set>

namespace shardwise::nn {

void RandomState::add(at::Generator generator) {
  const std::lock_guard lock(generator.mutex());
  auto state = generator.get_state();
  states_.emplace_back(std::move(generator), std::move(state));
}

RandomState RandomState::now(at::TensorList tensors) {
  const base::ComputeGuard guard;
  std::set<c10::DeviceIndex> devices;
  // Torch names an accelerator that it was built for even if there is none.
  const auto accelerator = at::accelerator::deviceCount() > 0 ? at::accelerator::getAccelerator() : std::nullopt;
  for (const auto& tensor : tensors) {
    if (accelerator && tensor.defined() && tensor.device().type() == *accelerator) devices.insert(tensor.get_device());
  }
  if (accelerator) {
    // To ask an unused device for its generator would start it.
    const auto current = at::accelerator::getDeviceIndex();
    if (at::globalContext().getAcceleratorHooksInterface(accelerator).hasPrimaryContext(current)) {
      devices.insert(current);
    }
  }
  RandomState state;
  state.add(at::detail::getDefaultCPUGenerator());
  for (const auto device : devices) state.add(at::globalContext().defaultGenerator({*accelerator, device}));
  return state;
}

RandomState RandomState::now(const RandomState& other) {
  const base::ComputeGuard guard;
  RandomState state;
  for (const auto& [generator, then] : other.states_) state.add(generator);
  return state;
}

void RandomState::restore() const {
  const base::ComputeGuard guard;
  for (auto [generator, state] : states_) {
    const std::lock_guard lock(generator.mutex());
    generator.set_state(state);
  }
}

} // namespace shardwise::nn
