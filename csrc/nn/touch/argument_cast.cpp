#include "nn/touch/argument_cast.h"

#include "nn/touch/touch.h"

#include <ATen/core/function_schema.h>

namespace shardwise::nn {

void cast_arguments(
    const c10::FunctionSchema& schema, torch::jit::Stack& stack, at::ScalarType dtype, const TouchListener& listener) {
  const auto must_cast = [&](const c10::IValue& value) {
    if (!value.isTensor()) return false;
    const at::Tensor& tensor = value.toTensor();
    return tensor.defined() && tensor.is_floating_point() && tensor.scalar_type() != dtype && !has_touch_key(tensor) &&
           !listener.spares(tensor);
  };
  const auto cast = [&](const c10::IValue& value) { return must_cast(value) ? value.toTensor().to(dtype) : value; };
  const auto& arguments = schema.arguments();
  for (size_t i = 0; i < arguments.size(); ++i) {
    const auto* alias = arguments[i].alias_info();
    if (alias != nullptr && alias->isWrite()) continue;
    auto& value = stack[stack.size() - arguments.size() + i];
    if (value.isTensor()) {
      value = cast(value);
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const auto& element : value.toListRef()) list.push_back(cast(element).toTensor());
      value = list;
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> list;
      for (const auto& element : value.toListRef()) list.push_back(cast(element).to<std::optional<at::Tensor>>());
      value = list;
    }
  }
}

} // namespace shardwise::nn
