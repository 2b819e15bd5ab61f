#include "bindings/bindings.h"

#include "comm/language_lock.h"

#include <shardwise/error.h>
#include <shardwise/record.h>
#include <shardwise/shared_memory.h>
#include <shardwise/version.h>

namespace {

void* release_gil() {
  return PyGILState_Check() != 0 ? PyEval_SaveThread() : nullptr;
}

void take_gil(void* released) {
  PyEval_RestoreThread(static_cast<PyThreadState*>(released));
}

} // namespace

PYBIND11_MODULE(_C, module) {
  namespace py = pybind11;
  module.doc() = "The shardwise engine. Use the package shardwise, not this module.";
  module.attr("__version__") = SHARDWISE_VERSION;

  py::register_local_exception<shardwise::Error>(module, "Error", PyExc_RuntimeError);
  py::register_local_exception<shardwise::PeerError>(module, "PeerError", module.attr("Error"));
  py::register_local_exception<shardwise::ValueError>(
      module, "ValueError", py::make_tuple(module.attr("Error"), py::handle(PyExc_ValueError)));

  shardwise::comm::set_language_lock({.release = release_gil, .take = take_gil});
  shardwise::bindings::bind_mesh(module);
  shardwise::bindings::bind_unit(module);
  shardwise::bindings::bind_cpp_modules(module);
  shardwise::bindings::bind_estimate(module);
  module.def(
      "on_shared_memory",
      [](uintptr_t listener) { shardwise::on_shared_memory(reinterpret_cast<void (*)(int64_t)>(listener)); },
      pybind11::arg("listener"), "The address of a C function of the bytes that are more, for measurements.");
  module.def("start_record", &shardwise::start_record);
  module.def("stop_record", &shardwise::stop_record);
}
