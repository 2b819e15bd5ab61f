#include "nn/random_state.h"

#include "base/compute_guard.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/detail/CUDAHooksInterface.h>

#include <mutex>

namespace shardwise::nn {

RandomState RandomState::now() {
  const base::ComputeGuard guard;
  std::vector<at::Generator> generators{at::detail::getDefaultCPUGenerator()};
  if (at::hasCUDA()) {
    const auto& cuda = at::detail::getCUDAHooks();
    const auto device = cuda.getCurrentDevice();
    // To ask an unused device for its generator would start it.
    if (device >= 0 && cuda.hasPrimaryContext(device)) generators.push_back(cuda.getDefaultGenerator(device));
  }
  RandomState state;
  for (auto& generator : generators) {
    const std::lock_guard lock(generator.mutex());
    state.states_.emplace_back(generator, generator.get_state());
  }
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
