#include "bindings/bindings.h"

#include "comm/mesh/process_group.h"
#include "comm/rendezvous/environment.h"

#include <shardwise/mesh.h>

#include <pybind11/chrono.h>

namespace shardwise::bindings {

void bind_mesh(pybind11::module_& module) {
  namespace py = pybind11;
  py::class_<Mesh>(module, "Mesh", "Named axes, with a process group for each.")
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

  module.def(
      "make_transport",
      [](const c10::intrusive_ptr<c10d::Store>& store, int rank, int size, std::chrono::milliseconds timeout,
         std::vector<int64_t> names) {
        return comm::make_transport(
            {.name = "cpu:shardwise",
             .store = store,
             .rank = rank,
             .size = size,
             .device = at::kCPU,
             .connect_timeout = timeout,
             .timeout = timeout,
             .shared_memory = comm::shared_memory_of_environment(),
             .names = std::move(names)});
      },
      NoGil(), py::arg("store"), py::arg("rank"), py::arg("size"), py::arg("timeout"), py::arg("names"),
      "The back end of the direct transport; `names` are the numbers of its ranks in the default process group, or "
      "none for that group itself.");
}

} // namespace shardwise::bindings
