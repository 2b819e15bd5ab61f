// Every other operation: its outputs are made at once, and the CPU's kernel runs on the same memory when its turn
// comes.
#include "late.h"

#include "generator.h"
#include "tensors.h"

#include <ATen/core/List.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/zeros.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <set>

namespace late {
namespace {

using Values = std::vector<c10::IValue>;
using Change = std::function<at::Tensor(const at::Tensor&)>;

/// The value with each tensor changed, and any device replaced.
c10::IValue changed(const c10::IValue& value, c10::DeviceType device, const Change& change) {
  const auto one = [&](const at::Tensor& tensor) { return tensor.defined() ? change(tensor) : tensor; };
  if (value.isTensor()) return one(value.toTensor());
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const auto& tensor : value.toTensorVector()) list.push_back(one(tensor));
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (const auto& tensor : value.toOptionalTensorVector()) {
      list.push_back(tensor ? std::optional(one(*tensor)) : std::nullopt);
    }
    return list;
  }
  if (value.isDevice() && value.toDevice().type() == c10::kPrivateUse1) return c10::Device(device);
  return value;
}

Values changed(const Values& values, c10::DeviceType device, const Change& change) {
  Values all;
  for (const auto& value : values) all.push_back(changed(value, device, change));
  return all;
}

void for_each_tensor(const c10::IValue& value, const std::function<void(const at::Tensor&)>& visit) {
  changed(value, c10::kCPU, [&](const at::Tensor& tensor) {
    visit(tensor);
    return tensor;
  });
}

bool is_written(const c10::Argument& argument) {
  const auto* alias = argument.alias_info();
  if (alias == nullptr) return false;
  const auto& inner = alias->containedTypes();
  return alias->isWrite() || std::any_of(inner.begin(), inner.end(), [](const auto& each) { return each.isWrite(); });
}

bool is_out(const c10::Argument& argument) {
  return argument.kwarg_only() && is_written(argument);
}

/// Whether a mask is among the indices.
bool has_mask(const Values& arguments) {
  bool found = false;
  for (const auto& argument : arguments) {
    if (!argument.isOptionalTensorList()) continue;
    for_each_tensor(argument, [&](const at::Tensor& tensor) {
      found = found || tensor.scalar_type() == at::kBool || tensor.scalar_type() == at::kByte;
    });
  }
  return found;
}

/// What these return depends on values, so the host waits for them.
bool needs_values(const c10::FunctionSchema& schema, const Values& arguments) {
  static const std::set<std::string> names{"aten::equal",
                                           "aten::is_nonzero",
                                           "aten::nonzero",
                                           "aten::masked_select",
                                           "aten::_unique",
                                           "aten::_unique2",
                                           "aten::unique_consecutive",
                                           "aten::repeat_interleave",
                                           "aten::bincount",
                                           "aten::unique_dim",
                                           "aten::_assert_async"};
  const auto returns_value = [](const auto& each) {
    return each.type()->kind() != c10::TypeKind::TensorType && each.type()->kind() != c10::TypeKind::ListType;
  };
  const auto& returns = schema.returns();
  return names.contains(schema.name()) || has_mask(arguments) ||
         std::any_of(returns.begin(), returns.end(), returns_value);
}

Values call(const c10::OperatorHandle& operation, Values arguments) {
  operation.callBoxed(&arguments);
  return arguments;
}

/// The call with its random numbers from this generator.
Values with_generator(
    const c10::FunctionSchema& schema, Values arguments, const std::function<c10::IValue(const c10::IValue&)>& choose) {
  for (size_t k = 0; k < arguments.size(); ++k) {
    const auto& type = schema.arguments()[k].type();
    const auto optional = type->cast<c10::OptionalType>();
    const auto& inner = optional ? optional->getElementType() : type;
    if (inner->kind() == c10::TypeKind::GeneratorType) arguments[k] = choose(arguments[k]);
  }
  return arguments;
}

/// These make their output as large as an input before they reduce it, and torch's kernel for meta tensors leaves it
/// so.
bool resizes_twice(const c10::FunctionSchema& schema) {
  return schema.overload_name() == "out" &&
         (schema.name() == "aten::mse_loss" || schema.name() == "aten::smooth_l1_loss");
}

/// What the operation returns and what its `out` arguments become, as far as sizes go. By the kernel for meta tensors
/// if there is one, else with zeros on the CPU.
struct Outline {
  Values arguments;
  Values returns;
};
Outline outline(const c10::OperatorHandle& operation, const Values& arguments) {
  if (!resizes_twice(operation.schema()) && operation.hasComputedKernelForDispatchKey(c10::DispatchKey::Meta)) {
    try {
      const auto on_meta = changed(arguments, c10::kMeta, [](const at::Tensor& tensor) {
        if (!is_late(tensor)) return tensor;
        return at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(at::kMeta));
      });
      const auto ready =
          with_generator(operation.schema(), on_meta, [](const c10::IValue& /*given*/) { return c10::IValue(); });
      return {ready, call(operation, ready)};
    } catch (const c10::NotImplementedError&) { // NOLINT(bugprone-empty-catch): zeros do it.
    }
  }
  const auto on_cpu = changed(arguments, c10::kCPU, [](const at::Tensor& tensor) {
    if (!is_late(tensor)) return tensor;
    return at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(at::kCPU)).zero_();
  });
  const auto ready = with_generator(operation.schema(), on_cpu, [](const c10::IValue& /*given*/) {
    return c10::IValue(draw(at::Generator(default_generator(-1).clone())));
  });
  return {ready, call(operation, ready)};
}

/// A number that is a tensor of the CPU is taken as it is now.
at::Tensor number_of_host(const c10::OperatorHandle& operation, const at::Tensor& tensor, bool is_index) {
  TORCH_CHECK(
      is_index || tensor.dim() == 0 || tensor.numel() == 0,
      "Expected all tensors to be on the same device, but found at least two devices, late and ", tensor.device(),
      "! (in ", operation.schema().name(), ")");
  auto copy = tensor.clone();
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) copy.unsafeGetTensorImpl()->set_wrapped_number(true);
  return copy;
}

std::optional<c10::Device> device_of(const Values& arguments) {
  std::optional<c10::Device> device;
  for (const auto& argument : arguments) {
    if (argument.isDevice() && !device) device = argument.toDevice();
    for_each_tensor(argument, [&](const at::Tensor& tensor) {
      if (is_late(tensor)) device = tensor.device();
    });
  }
  if (device && !device->has_index()) device->set_index(static_cast<c10::DeviceIndex>(current_device()));
  return device;
}

/// On the host, with values.
Values call_with_values(const c10::OperatorHandle& operation, const Values& arguments, const c10::Device& device) {
  const auto& schema = operation.schema();
  const auto here = changed(arguments, c10::kCPU, [](const at::Tensor& tensor) { return tensor.cpu(); });
  auto returns = call(operation, here);
  for (size_t k = 0; k < arguments.size(); ++k) {
    if (is_written(schema.arguments()[k]))
      arguments[k].toTensor().resize_(here[k].toTensor().sizes()).copy_(here[k].toTensor());
  }
  for (auto& each : returns)
    each = changed(each, device.type(), [&](const at::Tensor& tensor) { return tensor.to(device); });
  return returns;
}

void resize_outputs(const c10::FunctionSchema& schema, const Values& arguments, const Outline& outlined) {
  for (size_t k = 0; k < arguments.size(); ++k) {
    if (!is_out(schema.arguments()[k]) || !arguments[k].isTensor()) continue;
    const auto sizes = outlined.arguments[k].toTensor().sizes();
    if (arguments[k].toTensor().sizes() != sizes) arguments[k].toTensor().resize_(sizes);
  }
}

/// The argument that a return stands for; less than 0 if it is new.
int written_argument(const c10::FunctionSchema& schema, const c10::Argument& returned) {
  if (!is_written(returned)) return -1;
  for (size_t k = 0; k < schema.arguments().size(); ++k) {
    const auto* alias = schema.arguments()[k].alias_info();
    if (alias != nullptr && alias->beforeSets() == returned.alias_info()->beforeSets()) return static_cast<int>(k);
  }
  TORCH_CHECK(false, "late device: what does ", schema.name(), " return?");
}

Values run(const c10::OperatorHandle& operation, Values arguments) {
  const auto& schema = operation.schema();
  const auto device =
      device_of(arguments).value_or(c10::Device(c10::kPrivateUse1, static_cast<c10::DeviceIndex>(current_device())));
  const c10::DeviceGuard guard(device);
  if (needs_values(schema, arguments)) return call_with_values(operation, arguments, device);

  for (size_t k = 0; k < arguments.size(); ++k) {
    arguments[k] = changed(arguments[k], device.type(), [&](const at::Tensor& tensor) {
      return is_late(tensor) ? tensor : number_of_host(operation, tensor, arguments[k].isOptionalTensorList());
    });
  }
  // Whatever writes only its arguments, as they are, needs no outline.
  const auto& returns = schema.returns();
  const bool in_place = std::none_of(schema.arguments().begin(), schema.arguments().end(), is_out) &&
                        std::all_of(returns.begin(), returns.end(), is_written);
  const auto outlined = in_place ? Outline() : outline(operation, arguments);
  if (!in_place) resize_outputs(schema, arguments, outlined);

  Values made;
  std::vector<Use> uses;
  for (size_t k = 0; k < returns.size(); ++k) {
    const auto argument = written_argument(schema, returns[k]);
    if (argument >= 0) {
      made.push_back(arguments[argument]);
      continue;
    }
    TORCH_CHECK(
        returns[k].alias_info() == nullptr, "late device: ", schema.name(), " returns a view, and is not known here");
    made.push_back(changed(outlined.returns[k], device.type(), [&](const at::Tensor& tensor) {
      const auto result = empty_like_on(tensor, device);
      add_uses(result, true, uses);
      return result;
    }));
  }
  for (size_t k = 0; k < arguments.size(); ++k) {
    for_each_tensor(arguments[k], [&](const at::Tensor& tensor) {
      if (is_late(tensor)) add_uses(tensor, is_written(schema.arguments()[k]), uses);
    });
  }

  const auto worker = [](const at::Tensor& tensor) { return is_late(tensor) ? for_worker(tensor) : tensor; };
  auto inputs = with_generator(schema, changed(arguments, c10::kCPU, worker), [](const c10::IValue& given) {
    return c10::IValue(draw(given.isNone() ? std::nullopt : std::optional(given.toGenerator())));
  });
  std::vector<at::Tensor> targets;
  for (size_t k = 0; k < made.size(); ++k) {
    if (written_argument(schema, returns[k]) >= 0) continue;
    for_each_tensor(made[k], [&](const at::Tensor& tensor) { targets.push_back(for_worker(tensor)); });
  }
  if (resizes_twice(schema)) {
    // The device's memory cannot be resized: the output goes there at the end.
    targets = {inputs.back().toTensor()};
    inputs.back() = at::empty({0}, targets[0].options());
  }
  Device::of(device).issue(
      current_stream(device.index()).id(), schema.name().c_str(), uses,
      [operation, inputs = std::move(inputs), targets = std::move(targets)] {
        const auto results = call(operation, inputs);
        auto target = targets.begin();
        for (size_t k = 0; k < results.size() && target != targets.end(); ++k) {
          if (is_written(operation.schema().returns()[k]) && !resizes_twice(operation.schema())) continue;
          for_each_tensor(results[k], [&](const at::Tensor& tensor) { (target++)->copy_(tensor); });
        }
      });
  return made;
}

/// The arguments of a call, which leave the stack.
Values pop(const c10::OperatorHandle& operation, torch::jit::Stack* stack) {
  return torch::jit::pop(*stack, operation.schema().arguments().size());
}

void push(const Values& values, torch::jit::Stack* stack) {
  stack->insert(stack->end(), values.begin(), values.end());
}

void fallback(const c10::OperatorHandle& operation, torch::jit::Stack* stack) {
  push(run(operation, pop(operation, stack)), stack);
}

c10::OperatorHandle operation_named(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "");
}

// Torch asks a private device for its own convolutions.
void convolution(const c10::OperatorHandle& operation, torch::jit::Stack* stack) {
  push(run(operation_named("aten::convolution"), pop(operation, stack)), stack);
}

void convolution_backward(const c10::OperatorHandle& operation, torch::jit::Stack* stack) {
  auto arguments = pop(operation, stack);
  const auto weight = arguments[2].toTensor();
  const bool transposed = arguments[6].toBool();
  const auto channels = weight.size(transposed ? 1 : 0) * (transposed ? arguments[8].toInt() : 1);
  arguments.insert(arguments.begin() + 3, c10::IValue(std::vector<int64_t>{channels}));
  push(run(operation_named("aten::convolution_backward"), std::move(arguments)), stack);
}

} // namespace

void register_fallback() {
  auto* const all =
      new torch::Library(torch::Library::Kind::IMPL, "_", c10::DispatchKey::PrivateUse1, __FILE__, __LINE__);
  all->fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
  auto* const aten =
      new torch::Library(torch::Library::Kind::IMPL, "aten", c10::DispatchKey::PrivateUse1, __FILE__, __LINE__);
  // For these torch has kernels for any device too, which round differently.
  for (const auto* name : {"native_layer_norm", "native_group_norm"}) {
    aten->impl(name, torch::CppFunction::makeFromBoxedFunction<&fallback>());
  }
  aten->impl("convolution_overrideable", torch::CppFunction::makeFromBoxedFunction<&convolution>());
  aten->impl("convolution_backward_overrideable", torch::CppFunction::makeFromBoxedFunction<&convolution_backward>());
}

} // namespace late
