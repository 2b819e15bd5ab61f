#include "bindings/bindings.h"

#include <shardwise/error.h>
#include <shardwise/version.h>

PYBIND11_MODULE(_C, module) {
  namespace py = pybind11;
  module.doc() = "The shardwise engine. Use the package shardwise, not this module.";
  module.attr("__version__") = SHARDWISE_VERSION;

  py::register_local_exception<shardwise::Error>(module, "Error", PyExc_RuntimeError);
  py::register_local_exception<shardwise::PeerError>(module, "PeerError", module.attr("Error"));
  py::register_local_exception<shardwise::ValueError>(
      module, "ValueError", py::make_tuple(module.attr("Error"), py::handle(PyExc_ValueError)));

  shardwise::bindings::bind_mesh(module);
  shardwise::bindings::bind_unit(module);
}
