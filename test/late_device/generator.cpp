#include "generator.h"

#include "device.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Utils.h>
#include <ATen/ops/empty.h>
#include <c10/core/GeneratorImpl.h>

#include <array>
#include <cstring>

namespace late {
namespace {

struct Generator final : c10::GeneratorImpl {
  explicit Generator(int index)
      : GeneratorImpl(
            c10::Device(c10::kPrivateUse1, static_cast<c10::DeviceIndex>(index)),
            c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)) {}

  void set_current_seed(uint64_t seed) override {
    state = {seed, 0};
  }
  void set_offset(uint64_t offset) override {
    state[1] = offset;
  }
  uint64_t get_offset() const override {
    return state[1];
  }
  uint64_t current_seed() const override {
    return state[0];
  }
  uint64_t seed() override {
    set_current_seed(c10::detail::getNonDeterministicRandom());
    return current_seed();
  }
  void set_state(const c10::TensorImpl& from) override {
    at::detail::check_rng_state(from);
    TORCH_CHECK(from.numel() == sizeof state, "late device: this is no state of a generator of the late device");
    std::memcpy(state.data(), from.data(), sizeof state);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    const auto tensor = at::empty({sizeof state}, at::TensorOptions(at::kCPU).dtype(at::kByte));
    std::memcpy(tensor.mutable_data_ptr(), state.data(), sizeof state);
    return tensor.getIntrusivePtr();
  }
  Generator* clone_impl() const override {
    auto* copy = new Generator(device().index());
    copy->state = state;
    return copy;
  }

  std::array<uint64_t, 2> state{c10::default_rng_seed_val, 0};
};

} // namespace

const at::Generator& default_generator(int device) {
  static const auto* const all = [] {
    auto* generators = new std::vector<at::Generator>;
    for (int k = 0; k < kDevices; ++k) generators->push_back(new_generator(k));
    return generators;
  }();
  return all->at(device < 0 ? current_device() : device);
}

at::Generator new_generator(int device) {
  return at::make_generator<Generator>(device < 0 ? current_device() : device);
}

at::Generator draw(const std::optional<at::Generator>& given) {
  auto generator = given && given->defined() ? *given : default_generator(-1);
  TORCH_CHECK(
      generator.device().type() == c10::kPrivateUse1, "Expected a 'late' device type for generator but found '",
      generator.device().type(), "'");
  const std::lock_guard lock(generator.mutex());
  auto& own = *generator.get<Generator>();
  return at::detail::createCPUGenerator(own.state[0] * 6364136223846793005ULL + ++own.state[1]);
}

} // namespace late
