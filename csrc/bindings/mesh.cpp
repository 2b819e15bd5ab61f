#include "bindings/bindings.h"

#include <shardwise/mesh.h>

#include <pybind11/stl.h>

namespace shardwise::bindings {

void bind_mesh(pybind11::module_& module) {
  namespace py = pybind11;
  py::class_<Mesh>(module, "Mesh", "Named axes of process groups, as the engine sees them.")
      .def_static(
          "from_process_groups", &Mesh::from_process_groups, py::arg("names"), py::arg("groups"), py::arg("device"),
          "A mesh over process groups that exist, one for each axis, the slowest axis first.")
      .def_property_readonly(
          "axes",
          [](const Mesh& mesh) {
            std::vector<std::pair<std::string, int64_t>> axes;
            for (const auto& axis : mesh.axes()) axes.emplace_back(axis.name, axis.size);
            return axes;
          })
      .def_property_readonly("rank", &Mesh::rank)
      .def_property_readonly("device", &Mesh::device)
      .def("size", py::overload_cast<>(&Mesh::size, py::const_))
      .def("size", py::overload_cast<const std::string&>(&Mesh::size, py::const_), py::arg("axis"))
      .def("coordinate", &Mesh::coordinate, py::arg("axis"))
      .def("group", &Mesh::group, py::arg("axis"))
      .def("__repr__", &Mesh::describe);
}

} // namespace shardwise::bindings
