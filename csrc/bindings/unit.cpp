#include "bindings/bindings.h"

#include "python_front/kept_object.h"
#include "python_front/module_unit.h"

#include <shardwise/unit.h>

#include <pybind11/functional.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/tensor_dtypes.h>

namespace shardwise::bindings {
namespace {

namespace py = pybind11;
using python_front::GivenParameter;
using python_front::KeptObject;
using python_front::ModuleUnit;

std::optional<at::ScalarType> dtype_of(const py::object& dtype) {
  if (dtype.is_none()) return std::nullopt;
  return reinterpret_cast<THPDtype*>(dtype.ptr())->scalar_type;
}

/// (names, owners, full, memory, values, shard_dim)
using Given = std::tuple<
    std::vector<std::string>, std::vector<std::pair<py::object, std::string>>, py::object, py::object, py::object,
    int64_t>;
using Adopted = std::vector<std::pair<std::vector<std::string>, at::Tensor>>;

std::shared_ptr<ModuleUnit> make_unit(
    const Mesh& mesh, std::vector<Given> parameters, Adopted adopted, bool replicates, const py::object& param_dtype,
    const py::object& reduce_dtype, bool casts, std::optional<bool> pin_memory,
    const std::optional<std::variant<bool, int>>& reshard_after_forward) {
  std::vector<GivenParameter> given;
  for (auto& [names, owners, full, memory, values, dim] : parameters) {
    given.push_back({std::move(names), std::move(owners), std::move(full), std::move(memory), std::move(values), dim});
  }
  engine::UnitSettings settings;
  settings.replicates = replicates;
  settings.precision = {.param_dtype = dtype_of(param_dtype), .reduce_dtype = dtype_of(reduce_dtype)};
  settings.layout = replicates && !casts ? group::Layout::replicate : group::Layout::rows;
  if (pin_memory) settings.offload = CpuOffload{*pin_memory};
  if (reshard_after_forward) {
    settings.reshard_after_forward =
        std::visit([](auto value) { return ReshardAfterForward(value); }, *reshard_after_forward);
  }
  return std::make_shared<ModuleUnit>(mesh, std::move(given), std::move(adopted), std::move(settings));
}

py::dict counters(const ModuleUnit& unit) {
  const auto c = unit.handle().counters();
  py::dict result;
  result["backwards"] = c.backwards;
  result["all_reduces"] = c.all_reduces;
  result["broadcasts"] = c.broadcasts;
  result["all_gathers"] = c.all_gathers;
  result["reduce_scatters"] = c.reduce_scatters;
  result["collective_bytes"] = c.collective_bytes;
  result["comparisons"] = c.comparisons;
  result["unshards"] = c.unshards;
  result["reshards"] = c.reshards;
  result["copied_bytes"] = c.copied_bytes;
  result["unsharded_bytes"] = c.unsharded_bytes;
  result["allocations"] = c.allocations;
  return result;
}

std::vector<Unit> handles(const std::vector<std::shared_ptr<ModuleUnit>>& units) {
  std::vector<Unit> handles;
  for (const auto& unit : units) handles.push_back(unit->handle());
  return handles;
}

/// A Python collective: comm(output_tensor=..., input_tensor=..., group=...), and op= where it sums.
CustomCollective custom(const py::object& comm, bool sums) {
  if (comm.is_none()) return {};
  return [comm = KeptObject(comm), sums](at::Tensor& output, at::Tensor& input, c10d::ProcessGroup& group) {
    const py::gil_scoped_acquire gil;
    py::dict keywords;
    keywords["output_tensor"] = output;
    keywords["input_tensor"] = input;
    keywords["group"] = c10::intrusive_ptr<c10d::ProcessGroup>::reclaim_copy(&group);
    if (sums) keywords["op"] = py::module_::import("torch.distributed").attr("ReduceOp").attr("SUM");
    keywords["async_op"] = true;
    const auto work = comm.get()(**keywords);
    return work.is_none() ? c10::intrusive_ptr<c10d::Work>() : work.cast<c10::intrusive_ptr<c10d::Work>>();
  };
}

std::function<void(at::Tensor&)> all_reduce_hook(const py::object& hook) {
  if (hook.is_none()) return {};
  return [hook = KeptObject(hook)](at::Tensor& sum) {
    const py::gil_scoped_acquire gil;
    hook.get()(sum);
  };
}

/// For a setter of the handle.
template <typename Value>
auto set(Unit& (Unit::*setter)(Value)) {
  return [setter](const ModuleUnit& self, std::decay_t<Value> value) { (self.handle().*setter)(value); };
}
auto set_all(Unit& (Unit::*setter)(bool, bool)) {
  return [setter](const ModuleUnit& self, bool value) { (self.handle().*setter)(value, /*recurse=*/false); };
}

} // namespace

void bind_unit(py::module_& module) {
  py::class_<Unsharding>(module, "Unsharding", "An unshard() under way.").def("wait", &Unsharding::wait, NoGil());

  py::class_<ModuleUnit, std::shared_ptr<ModuleUnit>>(
      module, "Unit", "The engine's side of one call.", py::dynamic_attr())
      .def(
          py::init(&make_unit), py::arg("mesh"), py::arg("parameters"), py::arg("adopted"), py::kw_only(),
          py::arg("replicates"), py::arg("param_dtype"), py::arg("reduce_dtype"), py::arg("casts"),
          py::arg("pin_memory"), py::arg("reshard_after_forward"))
      .def_property_readonly("name", [](const ModuleUnit& self) { return self.unit().name(); })
      .def("shards", &ModuleUnit::shards)
      .def("show_as", &ModuleUnit::show_as, py::arg("index"), py::arg("parameter"), py::arg("to_memory"))
      .def("look_again", &ModuleUnit::look_again)
      .def("set_modules", &ModuleUnit::set_modules, py::arg("modules"))
      .def("set_conversions", &ModuleUnit::set_conversions, py::arg("inputs"), py::arg("outputs"))
      .def("pre_forward", &ModuleUnit::pre_forward)
      .def("post_forward", &ModuleUnit::post_forward)
      .def(
          "unshard", [](const ModuleUnit& self) { return self.handle().unshard(/*async=*/true); }, NoGil())
      .def(
          "reshard", [](const ModuleUnit& self) { self.handle().reshard(); }, NoGil())
      .def(
          "reset", [](const ModuleUnit& self) { self.handle().reset(); }, NoGil())
      .def_property_readonly("shows_full", [](const ModuleUnit& self) { return self.unit().shows_full(); })
      .def(
          "reduce_pending", [](const ModuleUnit& self) { self.unit().reduce_pending(); }, NoGil())
      .def("set_is_last_backward", set(&Unit::set_is_last_backward))
      .def("set_requires_gradient_sync", set_all(&Unit::set_requires_gradient_sync))
      .def("requires_gradient_sync", [](const ModuleUnit& self) { return self.handle().requires_gradient_sync(); })
      .def("set_requires_all_reduce", set_all(&Unit::set_requires_all_reduce))
      .def("set_reshard_after_forward", set_all(&Unit::set_reshard_after_forward))
      .def("set_reshard_after_backward", set_all(&Unit::set_reshard_after_backward))
      .def("set_unshard_in_backward", set(&Unit::set_unshard_in_backward))
      .def("set_gradient_divide_factor", set(&Unit::set_gradient_divide_factor))
      .def("set_force_sum_reduction", set(&Unit::set_force_sum_reduction))
      .def("set_prefetch", set(&Unit::set_prefetch))
      .def("free_idle_memory", [](const ModuleUnit& self) { self.handle().free_idle_memory(); })
      .def(
          "set_forward_prefetch",
          [](const ModuleUnit& self, const std::vector<std::shared_ptr<ModuleUnit>>& units) {
            self.handle().set_forward_prefetch(handles(units));
          })
      .def(
          "set_backward_prefetch",
          [](const ModuleUnit& self, const std::vector<std::shared_ptr<ModuleUnit>>& units) {
            self.handle().set_backward_prefetch(handles(units));
          })
      .def(
          "set_custom_all_gather",
          [](const ModuleUnit& self, const py::object& comm) {
            self.handle().set_custom_all_gather(custom(comm, /*sums=*/false));
          })
      .def(
          "set_custom_reduce_scatter",
          [](const ModuleUnit& self, const py::object& comm) {
            self.handle().set_custom_reduce_scatter(custom(comm, /*sums=*/true));
          })
      .def(
          "set_all_reduce_hook",
          [](const ModuleUnit& self, const py::object& hook) {
            self.handle().set_all_reduce_hook(all_reduce_hook(hook));
          })
      .def("plan_table", [](const ModuleUnit& self) { return self.handle().plan().table(); })
      .def("plan_json", [](const ModuleUnit& self) { return self.handle().plan().json(); })
      .def("counters", &counters);

  module.def(
      "share_comm_context",
      [](const std::vector<std::shared_ptr<ModuleUnit>>& units) { share_comm_context(handles(units)); },
      py::arg("units"));
  module.def(
      "has_unit", [](const at::Tensor& tensor) { return engine::Unit::of(tensor) != nullptr; }, py::arg("tensor"),
      "Whether a unit has this parameter.");
}

} // namespace shardwise::bindings
