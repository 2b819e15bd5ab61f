#include "python_front/dtensor_parameter.h"

#include <torch/csrc/autograd/python_variable.h>

namespace shardwise::python_front {

namespace py = pybind11;

namespace {

/// Python's lock. What at_once() runs has it, and takes it again at no cost.
class Lock {
 public:
  Lock() {
    if (held_++ == 0) gil_.emplace();
  }
  Lock(const Lock&) = delete;
  Lock& operator=(const Lock&) = delete;
  ~Lock() {
    --held_;
  }

 private:
  static thread_local int held_;
  std::optional<py::gil_scoped_acquire> gil_;
};

thread_local int Lock::held_ = 0;

// The Python objects here are never freed, since the interpreter may be gone before them.

/// Looked up at the first use, when Python has imported it.
const py::object& dtensor_class() {
  static const auto* const value = new py::object(py::module_::import("torch.distributed.tensor").attr("DTensor"));
  return *value;
}

/// The attribute of a DTensor that has the tensor it wraps. Made once, since it is used for every parameter in every
/// step.
PyObject* local_tensor_name() {
  static auto* const name = PyUnicode_InternFromString("_local_tensor");
  return name;
}

py::object local_of(py::handle dtensor) {
  auto* local = PyObject_GetAttr(dtensor.ptr(), local_tensor_name());
  if (local == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(local);
}

void set_local(py::handle dtensor, py::handle local) {
  if (PyObject_SetAttr(dtensor.ptr(), local_tensor_name(), local.ptr()) != 0) throw py::error_already_set();
}

bool is_around(py::handle local, const at::Tensor& tensor) {
  return THPVariable_Check(local.ptr()) && THPVariable_Unpack(local.ptr()).is_same(tensor);
}

bool is_ours_alone(py::handle tensor) {
  return Py_REFCNT(tensor.ptr()) == 1 && THPVariable_Unpack(tensor.ptr()).use_count() == 1;
}

} // namespace

DTensorParameter::DTensorParameter(const py::object& parameter, const py::object& to_memory) : parameter_(parameter) {
  if (to_memory.is_none()) return;
  to_memory_.emplace(to_memory);
  may_sum_arriving_ = py::cast<bool>(to_memory.attr("may_sum"));
}

const at::Tensor& DTensorParameter::parameter() const {
  return THPVariable_Unpack(parameter_.get().ptr());
}

// A mean comes again only if nobody holds it or its DTensor, and a DTensor wraps nothing only if nobody holds it. So
// either DTensor may be given out again.
at::Tensor DTensorParameter::gradient(const at::Tensor& mean) {
  const Lock lock;
  Shown* vacant = nullptr;
  for (auto& shown : shown_) {
    const auto dtensor = shown.dtensor.get();
    const auto local = local_of(dtensor);
    if (is_around(local, mean)) return THPVariable_Unpack(dtensor.ptr());
    if (local.is_none()) vacant = &shown;
  }
  if (vacant == nullptr) {
    const auto spec = parameter_.get().attr("_spec");
    if (shown_.size() == 2) shown_.erase(shown_.begin());
    vacant = &shown_.emplace_back(Shown{KeptObject(dtensor_class()(mean, spec, py::arg("requires_grad") = false))});
  }
  const auto dtensor = vacant->dtensor.get();
  if (!is_around(local_of(dtensor), mean)) set_local(dtensor, py::cast(mean));
  const auto local = local_of(dtensor);
  vacant->uses = mean.use_count();
  vacant->references = Py_REFCNT(local.ptr());
  return THPVariable_Unpack(dtensor.ptr());
}

bool DTensorParameter::is_held(const at::Tensor& mean) const {
  const Lock lock;
  for (const auto& shown : shown_) {
    const auto dtensor = shown.dtensor.get();
    const auto local = local_of(dtensor);
    if (!is_around(local, mean)) continue;
    return !is_ours_alone(dtensor) || mean.use_count() != shown.uses || Py_REFCNT(local.ptr()) != shown.references;
  }
  return mean.use_count() > 1;
}

void DTensorParameter::release() {
  const Lock lock;
  for (const auto& shown : shown_) {
    if (is_ours_alone(shown.dtensor.get())) set_local(shown.dtensor.get(), py::none());
  }
}

at::Tensor DTensorParameter::memory(const at::Tensor& gradient) {
  const Lock lock;
  const auto object = py::cast(gradient);
  if (!py::isinstance(object, dtensor_class())) return gradient;
  return py::cast<at::Tensor>(local_of(object));
}

at::Tensor DTensorParameter::arrived(const at::Tensor& gradient) {
  if (!to_memory_) return gradient;
  const Lock lock;
  return py::cast<at::Tensor>(to_memory_->get()(gradient));
}

void DTensorParameter::at_once(c10::function_ref<void()> work) const {
  const Lock lock;
  work();
}

} // namespace shardwise::python_front
