#pragma once

// What handles have in Python, those of nn.Modules and those of C++ modules alike.
#include "bindings/bindings.h"

#include "python_front/kept_object.h"
#include "python_front/module_unit.h"

#include <shardwise/unit.h>

#include <pybind11/stl.h>

#include <type_traits>

namespace shardwise::bindings {

inline Unit handle_of(const python_front::ModuleUnit& unit) {
  return unit.handle();
}
inline Unit handle_of(const Unit& unit) {
  return unit;
}

/// A unit of either front end, as it comes from Python.
using AnyUnit = std::variant<std::shared_ptr<python_front::ModuleUnit>, Unit>;
std::vector<Unit> handles(const std::vector<AnyUnit>& units);

/// A collective in Python, called as comm(output_tensor=..., input_tensor=..., group=..., async_op=True), with op= if
/// it sums.
CustomCollective custom(const pybind11::object& comm, bool sums);
std::function<void(at::Tensor&)> all_reduce_hook(const pybind11::object& hook);

/// The next forward waits for the event; for C++ modules this call does.
template <typename Self>
void set_post_optim_event(const Self& self, const pybind11::object& event) {
  const auto wait = [event = python_front::KeptObject(event)] {
    const pybind11::gil_scoped_acquire gil;
    if (!event.get().is_none()) event.get().attr("wait")();
  };
  if constexpr (std::is_same_v<Self, Unit>) {
    wait();
  } else {
    self.unit().schedule()->await_event = wait;
  }
}

template <typename Bound>
void bind_handle(Bound& bound) {
  namespace py = pybind11;
  using Self = typename Bound::type;
  const auto set = []<typename Value>(Unit& (Unit::*setter)(Value)) {
    return [setter](const Self& self, Value value) { (handle_of(self).*setter)(value); };
  };
  const auto set_alone = []<typename Value>(Unit& (Unit::*setter)(Value, bool)) {
    return [setter](const Self& self, Value value) { (handle_of(self).*setter)(value, /*recurse=*/false); };
  };
  const auto set_prefetch = [](Unit& (Unit::*setter)(const std::vector<Unit>&)) {
    return [setter](const Self& self, const std::vector<AnyUnit>& units) { (handle_of(self).*setter)(handles(units)); };
  };
  const auto set_custom = [](Unit& (Unit::*setter)(const CustomCollective&), bool sums) {
    return [setter, sums](const Self& self, const py::object& comm) { (handle_of(self).*setter)(custom(comm, sums)); };
  };
  bound.def_property_readonly("name", [](const Self& self) { return handle_of(self).name(); })
      .def(
          "unshard", [](const Self& self) { return handle_of(self).unshard(/*async=*/true); }, NoGil())
      .def(
          "reshard", [](const Self& self) { handle_of(self).reshard(); }, NoGil())
      .def("set_post_optim_event", &set_post_optim_event<Self>, py::arg("event"))
      .def("set_manual_backward_finalization", set(&Unit::set_manual_backward_finalization), py::arg("value"))
      .def(
          "finalize_backward", [](const Self& self) { return handle_of(self).finalize_backward(/*async=*/true); },
          NoGil())
      .def(
          "reset_iter_state", [](const Self& self) { handle_of(self).reset_iter_state(); }, NoGil())
      .def(
          "free_idle_memory", [](const Self& self) { handle_of(self).free_idle_memory(); }, NoGil())
      .def("set_reduce_scatter_unused_params", set_alone(&Unit::set_reduce_scatter_unused_params), py::arg("value"))
      .def("set_requires_gradient_sync", set_alone(&Unit::set_requires_gradient_sync), py::arg("value"))
      .def("requires_gradient_sync", [](const Self& self) { return handle_of(self).requires_gradient_sync(); })
      .def("set_requires_all_reduce", set_alone(&Unit::set_requires_all_reduce), py::arg("value"))
      .def("set_reshard_after_forward", set_alone(&Unit::set_reshard_after_forward), py::arg("value"))
      .def("set_reshard_after_backward", set_alone(&Unit::set_reshard_after_backward), py::arg("value"))
      .def("set_keep_unsharded_storage", set_alone(&Unit::set_keep_unsharded_storage), py::arg("value"))
      .def(
          "set_reduce_scatter_max_input_buffers", set_alone(&Unit::set_reduce_scatter_max_input_buffers),
          py::arg("count"))
      .def("set_memory_from_process_group", set(&Unit::set_memory_from_process_group), py::arg("value"))
      .def("set_unshard_in_backward", set(&Unit::set_unshard_in_backward), py::arg("value"))
      .def("set_gradient_divide_factor", set(&Unit::set_gradient_divide_factor), py::arg("factor"))
      .def("set_force_sum_reduction", set(&Unit::set_force_sum_reduction), py::arg("value"))
      .def("set_forward_prefetch", set_prefetch(&Unit::set_forward_prefetch), py::arg("units"))
      .def("set_backward_prefetch", set_prefetch(&Unit::set_backward_prefetch), py::arg("units"))
      .def("set_custom_all_gather", set_custom(&Unit::set_custom_all_gather, /*sums=*/false), py::arg("comm"))
      .def("set_custom_reduce_scatter", set_custom(&Unit::set_custom_reduce_scatter, /*sums=*/true), py::arg("comm"))
      .def(
          "set_all_reduce_hook",
          [](const Self& self, const py::object& hook) { handle_of(self).set_all_reduce_hook(all_reduce_hook(hook)); },
          py::arg("hook"))
      .def("plan_table", [](const Self& self) { return handle_of(self).plan().table(); })
      .def("plan_json", [](const Self& self) { return handle_of(self).plan().json(); })
      .def("counters", [](const Self& self) { return named(handle_of(self).counters()); });
}

} // namespace shardwise::bindings
