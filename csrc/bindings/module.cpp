#include "bindings/bindings.h"

#include "base/caller.h"
#include "observe/record.h"

#include <shardwise/error.h>
#include <shardwise/record.h>
#include <shardwise/shared_memory.h>
#include <shardwise/version.h>

#include <torch/csrc/Exceptions.h>

#include <exception>
#include <utility>

namespace {

void* release_gil() {
  return PyGILState_Check() != 0 ? PyEval_SaveThread() : nullptr;
}

void take_gil(void* released) {
  PyEval_RestoreThread(static_cast<PyThreadState*>(released));
}

/// The Python classes of our errors; never freed.
PyObject* error_class = nullptr;
PyObject* peer_error_class = nullptr;
PyObject* value_error_class = nullptr;

PyObject* class_of(const shardwise::Error& error) {
  if (dynamic_cast<const shardwise::PeerError*>(&error) != nullptr) return peer_error_class;
  return dynamic_cast<const shardwise::ValueError*>(&error) != nullptr ? value_error_class : error_class;
}

// For our errors in other extension modules, whose C++ models raise them: those modules do not know our classes.
void translate(std::exception_ptr thrown) {
  try {
    if (thrown) std::rethrow_exception(std::move(thrown));
  } catch (const shardwise::Error& error) {
    PyErr_SetString(class_of(error), error.what());
  }
}

// Autograd and the dispatcher pass Python's own errors on as they are, and turn others into a RuntimeError.
void rethrow_in_python() {
  const pybind11::gil_scoped_acquire gil;
  try {
    throw;
  } catch (const shardwise::Error& error) {
    PyErr_SetString(class_of(error), error.what());
  }
  python_error raised;
  raised.persist();
  throw raised;
}

} // namespace

PYBIND11_MODULE(_C, module) {
  namespace py = pybind11;
  module.doc() = "The shardwise engine. Use the package shardwise, not this module.";
  module.attr("__version__") = SHARDWISE_VERSION;

  error_class = py::register_local_exception<shardwise::Error>(module, "Error", PyExc_RuntimeError).inc_ref().ptr();
  // A program that catches torch's errors about other ranks catches ours too.
  const auto dist_error = py::module_::import("torch.distributed").attr("DistError");
  peer_error_class = py::register_local_exception<shardwise::PeerError>(
                         module, "PeerError", py::make_tuple(module.attr("Error"), dist_error))
                         .inc_ref()
                         .ptr();
  value_error_class = py::register_local_exception<shardwise::ValueError>(
                          module, "ValueError", py::make_tuple(module.attr("Error"), py::handle(PyExc_ValueError)))
                          .inc_ref()
                          .ptr();

  py::register_exception_translator(translate);
  shardwise::base::set_caller({.release = release_gil, .take = take_gil}, rethrow_in_python);
  shardwise::bindings::bind_mesh(module);
  shardwise::bindings::bind_options(module);
  shardwise::bindings::bind_handle(module);
  shardwise::bindings::bind_unit(module);
  shardwise::bindings::bind_cpp_modules(module);
  shardwise::bindings::bind_estimate(module);
  shardwise::bindings::bind_checkpoint(module);
  shardwise::bindings::bind_parallelism(module);
  module.def(
      "set_shared_memory_listener",
      [](uintptr_t listener) { shardwise::set_shared_memory_listener(reinterpret_cast<void (*)(int64_t)>(listener)); },
      pybind11::arg("listener"), "The address of a C function that gets each change in bytes, for measurements.");
  module.def("start_record", &shardwise::start_record);
  module.def("stop_record", &shardwise::stop_record);
  module.def(
      "make_record_file", &shardwise::observe::make_record_file, pybind11::arg("folder"), pybind11::arg("rank"),
      "Makes a new file for the record of a rank, and returns its path.");
}
