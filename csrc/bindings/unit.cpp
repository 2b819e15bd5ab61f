#include "bindings/bindings.h"

#include "engine/unit.h"

#include <shardwise/unit.h>

#include <pybind11/stl.h>

namespace shardwise::bindings {
namespace {

using Named = std::pair<std::vector<std::string>, at::Tensor>;

Unit replicate(const Mesh& mesh, std::vector<Named> parameters) {
  std::vector<engine::NamedTensor> tensors;
  for (auto& [names, tensor] : parameters) tensors.push_back({.names = std::move(names), .tensor = std::move(tensor)});
  return Unit(engine::Unit::create(mesh, std::move(tensors), {}, {}));
}

pybind11::dict counters(const Unit& unit) {
  const auto c = unit.counters();
  pybind11::dict result;
  result["backwards"] = c.backwards;
  result["all_reduces"] = c.all_reduces;
  result["broadcasts"] = c.broadcasts;
  result["all_gathers"] = c.all_gathers;
  result["collective_bytes"] = c.collective_bytes;
  result["comparisons"] = c.comparisons;
  result["copied_bytes"] = c.copied_bytes;
  result["allocations"] = c.allocations;
  return result;
}

} // namespace

void bind_unit(pybind11::module_& module) {
  namespace py = pybind11;
  py::class_<Unit>(module, "Unit", "The engine's side of one replicate() call.")
      .def_property_readonly("name", &Unit::name)
      .def("set_requires_gradient_sync", &Unit::set_requires_gradient_sync, py::arg("value"), py::arg("recurse"))
      .def("requires_gradient_sync", &Unit::requires_gradient_sync)
      .def("plan_table", [](const Unit& unit) { return unit.plan().table(); })
      .def("plan_json", [](const Unit& unit) { return unit.plan().json(); })
      .def("counters", &counters);
  module.def(
      "is_watched", [](const std::optional<at::Tensor>& tensor) { return tensor && engine::Unit::of(*tensor); },
      py::arg("tensor"), "Whether a unit has this parameter.");
  module.def(
      "replicate", &replicate, py::arg("mesh"), py::arg("parameters"), NoGil(),
      "Makes a unit of parameters, given as (names, tensor), each tensor once.");
}

} // namespace shardwise::bindings
