#include "python_front/dtensor_face.h"

#include <torch/csrc/autograd/python_variable.h>

namespace shardwise::python_front {

namespace py = pybind11;

namespace {

/// Only found in a Python that imported it.
const py::object& dtensor_class() {
  static const auto* const value = new py::object(py::module_::import("torch.distributed.tensor").attr("DTensor"));
  return *value;
}

bool is_ours_alone(py::handle tensor) {
  return Py_REFCNT(tensor.ptr()) == 1 && THPVariable_Unpack(tensor.ptr()).use_count() == 1;
}

} // namespace

DTensorFace::DTensorFace(const py::object& parameter, const py::object& to_memory) : parameter_(parameter) {
  if (!to_memory.is_none()) to_memory_.emplace(to_memory);
}

const at::Tensor& DTensorFace::parameter() const {
  return THPVariable_Unpack(parameter_.get().ptr());
}

at::Tensor DTensorFace::gradient(const at::Tensor& mean) {
  const py::gil_scoped_acquire gil;
  if (gradient_ && is_ours_alone(gradient_->get())) {
    gradient_->get().attr("_local_tensor") = mean;
  } else {
    const auto spec = parameter_.get().attr("_spec");
    gradient_.emplace(dtensor_class()(mean, spec, py::arg("requires_grad") = false));
  }
  return THPVariable_Unpack(gradient_->get().ptr());
}

void DTensorFace::release() {
  if (!gradient_) return;
  const py::gil_scoped_acquire gil;
  if (is_ours_alone(gradient_->get())) gradient_->get().attr("_local_tensor") = py::none();
}

at::Tensor DTensorFace::memory(const at::Tensor& gradient) {
  const py::gil_scoped_acquire gil;
  const auto object = py::cast(gradient);
  if (!py::isinstance(object, dtensor_class())) return gradient;
  return py::cast<at::Tensor>(object.attr("_local_tensor"));
}

at::Tensor DTensorFace::arrived(const at::Tensor& gradient) {
  if (!to_memory_) return gradient;
  const py::gil_scoped_acquire gil;
  return py::cast<at::Tensor>(to_memory_->get()(gradient));
}

} // namespace shardwise::python_front
