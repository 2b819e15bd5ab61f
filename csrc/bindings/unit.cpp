#include "bindings/bindings.h"

#include "group/leaf_storage.h"
#include "python_front/kept_object.h"
#include "python_front/module_unit.h"

#include <algorithm>

namespace shardwise::bindings {
namespace {

namespace py = pybind11;
using python_front::GivenParameter;
using python_front::ModuleUnit;

using Adopted = std::vector<std::pair<std::vector<std::string>, at::Tensor>>;

/// Whether a replicated module may compute with other memory than that of the optimizer's parameters.
bool may_differ(const Options& options, const std::vector<GivenParameter>& parameters, const Mesh& mesh) {
  return options.precision.param_dtype() || (options.offload && !mesh.device().is_cpu()) ||
         std::any_of(parameters.begin(), parameters.end(), [](const auto& each) { return !each.extension.is_none(); });
}

std::shared_ptr<ModuleUnit> make_unit(
    const Mesh& mesh, std::vector<GivenParameter> parameters, Adopted adopted, const Options& options, bool replicates,
    const std::optional<c10::intrusive_ptr<c10d::ProcessGroup>>& neighbours, bool is_companion,
    ModuleUnit::Companions companions) {
  const bool has_copies = !replicates || may_differ(options, parameters, mesh);
  return std::make_shared<ModuleUnit>(
      mesh, std::move(parameters), std::move(adopted), std::move(companions),
      engine::UnitSettings{
          .replicates = replicates,
          .layout = has_copies ? group::Layout::rows : group::Layout::replicate,
          .precision = options.precision,
          .offload = options.offload,
          .reshard_after_forward = options.reshard_after_forward,
          .is_companion = is_companion,
          .custom_on_mesh = true,
          .neighbours = neighbours.value_or(nullptr)});
}

void set_post_optim_event(const ModuleUnit& self, const py::object& event) {
  self.unit().schedule()->await_event = [event = python_front::KeptObject(event)] {
    const py::gil_scoped_acquire gil;
    if (!event.get().is_none()) event.get().attr("wait")();
  };
}

} // namespace

void bind_unit(py::module_& module) {
  py::class_<GivenParameter>(module, "GivenParameter", "A parameter as a unit takes it over.")
      .def(
          py::init<
              std::vector<std::string>, std::vector<std::pair<py::object, std::string>>, py::object, py::object,
              py::object, int64_t, std::optional<at::ScalarType>, std::optional<at::ScalarType>, py::object>(),
          py::kw_only(), py::arg("names"), py::arg("owners"), py::arg("full"), py::arg("memory"), py::arg("values"),
          py::arg("shard_dim"), py::arg("full_dtype"), py::arg("grad_dtype"), py::arg("extension"));

  py::class_<ModuleUnit, Unit, std::shared_ptr<ModuleUnit>>(
      module, "ModuleUnit", "The engine's side of one call for nn.Modules.", py::dynamic_attr())
      .def(
          py::init(&make_unit), py::arg("mesh"), py::arg("parameters"), py::arg("adopted"), py::arg("options"),
          py::kw_only(), py::arg("replicates"), py::arg("neighbours"), py::arg("is_companion"), py::arg("companions"))
      .def("shards", &ModuleUnit::shards)
      .def("show_as", &ModuleUnit::show_as, py::arg("index"), py::arg("parameter"), py::arg("to_memory"))
      .def("set_extend", &ModuleUnit::set_extend, py::arg("extend"))
      .def("look_again", &ModuleUnit::look_again)
      .def("take_memory", &ModuleUnit::take_memory)
      .def("set_modules", &ModuleUnit::set_modules, py::arg("modules"))
      .def("set_conversions", &ModuleUnit::set_conversions, py::arg("inputs"), py::arg("outputs"))
      .def("pre_forward", &ModuleUnit::pre_forward, py::arg("module"), py::arg("args"), py::arg("kwargs"))
      .def("post_forward", &ModuleUnit::post_forward, py::arg("module"), py::arg("args"), py::arg("output"))
      .def("fail_forward", &ModuleUnit::fail_forward)
      .def_property_readonly("shows_full", [](const ModuleUnit& self) { return self.unit().shows_full(); })
      .def(
          "reduce_pending", [](const ModuleUnit& self) { self.unit().schedule()->reduce_pending(); }, NoGil())
      .def("set_post_optim_event", &set_post_optim_event, py::arg("event"), "The next forward waits for the event.");

  module.def(
      "hollow",
      [](const std::vector<int64_t>& sizes, at::ScalarType dtype, at::Device device) {
        return group::LeafStorage(sizes, at::TensorOptions(device).dtype(dtype)).alias();
      },
      py::arg("sizes"), py::arg("dtype"), py::arg("device"),
      "A tensor of these sizes, to which a unit will give memory.");
  module.def(
      "has_unit", [](const at::Tensor& tensor) { return engine::Unit::of(tensor) != nullptr; }, py::arg("tensor"),
      "Whether a unit has this parameter.");
}

} // namespace shardwise::bindings
