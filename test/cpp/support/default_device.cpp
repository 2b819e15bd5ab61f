#include "support/default_device.h"

#include "base/compute_guard.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <atomic>
#include <mutex>

namespace shardwise::test {
namespace {

constexpr auto kMode = c10::DispatchKey::TESTING_ONLY_GenericMode;

/// What a call says about devices: the place of its argument for one, its generator, and its first tensor.
struct Call {
  c10::IValue* device = nullptr;
  c10::IValue* generator = nullptr;
  const at::Tensor* tensor = nullptr;
};

bool is(const c10::Argument& argument, c10::TypeKind kind) {
  const auto optional = argument.type()->cast<c10::OptionalType>();
  return (optional ? optional->getElementType() : argument.type())->kind() == kind;
}

Call look(const c10::OperatorHandle& operation, torch::jit::Stack& stack) {
  Call call;
  const auto& arguments = operation.schema().arguments();
  auto* value = &*(stack.end() - static_cast<std::ptrdiff_t>(arguments.size()));
  for (const auto& argument : arguments) {
    // Devices are integers to the dispatcher's types.
    if (argument.name() == "device") call.device = value;
    if (is(argument, c10::TypeKind::GeneratorType)) call.generator = value;
    if (call.tensor == nullptr && value->isTensor()) call.tensor = &value->toTensor();
    ++value;
  }
  return call;
}

bool is_of_cpu(const c10::IValue* generator) {
  return generator != nullptr && !generator->isNone() && generator->toGenerator().device().is_cpu();
}

thread_local std::optional<c10::Device> device_of_thread;
/// The kind of all devices of the process that are chosen so.
std::atomic<c10::DeviceType> kind{c10::kCPU};

/// The device of a mode that was handed on to this thread, such as one of autograd's, is the current one.
c10::Device chosen() {
  if (device_of_thread) return *device_of_thread;
  const c10::impl::VirtualGuardImpl guard(kind);
  return guard.getDevice();
}

void choose(const c10::OperatorHandle& operation, torch::jit::Stack* stack) {
  const c10::impl::ExcludeDispatchKeyGuard without(kMode);
  const auto call = look(operation, *stack);
  if (call.tensor == nullptr && call.device != nullptr) {
    // In shardwise::on_meta() that is the meta device.
    if (call.device->isNone() && c10::impl::tls_is_dispatch_key_included(base::kTouchKey)) {
      return operation.callBoxed(stack);
    }
    if (call.device->isNone()) *call.device = chosen();
    const auto device = call.device->toDevice();
    if (device.is_cpu() || device.is_meta() || !is_of_cpu(call.generator)) return operation.callBoxed(stack);
    *call.device = c10::Device(c10::kCPU);
    operation.callBoxed(stack);
    stack->back() = stack->back().toTensor().to(device);
    return;
  }
  if (call.tensor != nullptr && !call.tensor->is_cpu() && is_of_cpu(call.generator)) {
    // In place: drawn on the CPU, and copied.
    const auto target = *call.tensor;
    const auto first = stack->size() - operation.schema().arguments().size();
    (*stack)[first] = target.to(at::kCPU);
    operation.callBoxed(stack);
    target.copy_(stack->back().toTensor());
    stack->back() = target;
    return;
  }
  operation.callBoxed(stack);
}

void register_mode() {
  static std::once_flag once;
  std::call_once(once, [] {
    auto* const library = new torch::Library(torch::Library::Kind::IMPL, "_", kMode, __FILE__, __LINE__);
    library->fallback(torch::CppFunction::makeFromBoxedFunction<&choose>());
  });
}

} // namespace

DefaultDevice::DefaultDevice(c10::Device device)
    : before_(device_of_thread.value_or(c10::Device(c10::kCPU))),
      mode_((register_mode(), kMode)) {
  device_of_thread = device;
  kind = device.type();
}

DefaultDevice::~DefaultDevice() {
  device_of_thread = before_;
}

} // namespace shardwise::test
