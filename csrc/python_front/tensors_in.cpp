#include "python_front/tensors_in.h"

#include <torch/csrc/autograd/python_variable.h>

namespace shardwise::python_front {

namespace py = pybind11;

namespace {

/// What pytree finds in the value; the value itself if it is a leaf.
py::list leaves_of(py::handle value) {
  static const auto* const flatten = new py::object(py::module_::import("torch.utils._pytree").attr("tree_leaves"));
  return (*flatten)(value);
}

bool is_plain(py::handle value) {
  return value.is_none() || PyUnicode_Check(value.ptr()) || PyLong_Check(value.ptr()) || PyFloat_Check(value.ptr());
}

/// What a transform of torch.func wraps has a graph of its own, and so has its derivative.
void for_each_level(const at::Tensor& tensor, const std::function<void(const at::Tensor&)>& visit) {
  visit(tensor);
  constexpr c10::DispatchKeySet kWrapped({c10::DispatchKey::FuncTorchGradWrapper, c10::DispatchKey::FuncTorchBatched});
  if (!tensor.key_set().has_any(kWrapped)) return;
  static const auto* const unwrap = new py::object(py::module_::import("torch._C._functorch").attr("get_unwrapped"));
  for_each_level(py::cast<at::Tensor>((*unwrap)(tensor)), visit);
  const auto& derivative = tensor._fw_grad(/*level=*/0);
  if (derivative.defined()) for_each_level(derivative, visit);
}

} // namespace

void for_each_tensor_in(py::handle value, const std::function<void(const at::Tensor&)>& visit) {
  if (THPVariable_Check(value.ptr())) return for_each_level(THPVariable_Unpack(value.ptr()), visit);
  if (is_plain(value)) return;
  if (PyTuple_Check(value.ptr()) || PyList_Check(value.ptr())) {
    for (const auto& item : value) for_each_tensor_in(item, visit);
  } else if (PyDict_Check(value.ptr())) {
    for (const auto& item : py::reinterpret_borrow<py::dict>(value)) for_each_tensor_in(item.second, visit);
  } else if (py::hasattr(value, "__dataclass_fields__") && !py::isinstance<py::type>(value)) {
    for (const auto& name : value.attr("__dataclass_fields__")) {
      if (py::hasattr(value, name)) for_each_tensor_in(value.attr(name), visit);
    }
  } else {
    for (const auto& leaf : leaves_of(value)) {
      if (!leaf.is(value)) for_each_tensor_in(leaf, visit);
    }
  }
}

} // namespace shardwise::python_front
