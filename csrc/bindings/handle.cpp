// What handles have in Python, those of nn.Modules and those of C++ modules alike.
#include "bindings/bindings.h"

#include "python_front/kept_object.h"

#include <shardwise/unit.h>

namespace shardwise::bindings {
namespace {

namespace py = pybind11;
using python_front::KeptObject;

/// A collective in Python, called as comm(output_tensor=..., input_tensor=..., group=..., async_op=True), with op= if
/// it sums.
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

} // namespace

std::map<std::string, int64_t> named(const Counters& counters) {
  std::map<std::string, int64_t> result;
  for (const auto& counter : detail::kCounters) result.emplace(counter.name, counters.*counter.of);
  return result;
}

void bind_handle(py::module_& module) {
  py::class_<UnshardHandle>(module, "UnshardHandle", "An unshard() under way.")
      .def("wait", &UnshardHandle::wait, NoGil());

  py::class_<GradientReductionHandle>(module, "GradientReductionHandle", "The sums that finalize_backward() started.")
      .def("wait", &GradientReductionHandle::wait, NoGil());

  const auto set = []<typename Value>(Unit& (Unit::*setter)(Value)) {
    return [setter](Unit& self, Value value) { (self.*setter)(value); };
  };
  const auto set_alone = []<typename Value>(Unit& (Unit::*setter)(Value, bool)) {
    return [setter](Unit& self, Value value) { (self.*setter)(value, /*recurse=*/false); };
  };
  const auto set_custom = [](Unit& (Unit::*setter)(const CustomCollective&), bool sums) {
    return [setter, sums](Unit& self, const py::object& comm) { (self.*setter)(custom(comm, sums)); };
  };
  py::class_<Unit, std::shared_ptr<Unit>>(module, "Unit", "The handle on one call.")
      .def_property_readonly("name", &Unit::name)
      .def_property_readonly("kind", [](const Unit& self) { return self.plan().units.front().kind; })
      .def(
          "unshard", [](Unit& self) { return self.unshard(/*async=*/true); }, NoGil())
      .def(
          "reshard", [](Unit& self) { self.reshard(); }, NoGil())
      .def(
          "set_post_optim_event",
          [](const Unit& /*self*/, const py::object& event) {
            if (!event.is_none()) event.attr("wait")();
          },
          py::arg("event"), "This call waits for the event.")
      .def("set_manual_backward_finalization", set(&Unit::set_manual_backward_finalization), py::arg("value"))
      .def(
          "finalize_backward", [](Unit& self) { return self.finalize_backward(/*async=*/true); }, NoGil())
      .def(
          "reset_iter_state", [](Unit& self) { self.reset_iter_state(); }, NoGil())
      .def(
          "free_idle_memory", [](Unit& self) { self.free_idle_memory(); }, NoGil())
      .def("set_reduce_scatter_unused_params", set_alone(&Unit::set_reduce_scatter_unused_params), py::arg("value"))
      .def("set_requires_gradient_sync", set_alone(&Unit::set_requires_gradient_sync), py::arg("value"))
      .def("requires_gradient_sync", &Unit::requires_gradient_sync)
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
      .def("set_forward_prefetch", set(&Unit::set_forward_prefetch), py::arg("units"))
      .def("set_backward_prefetch", set(&Unit::set_backward_prefetch), py::arg("units"))
      .def("set_custom_all_gather", set_custom(&Unit::set_custom_all_gather, /*sums=*/false), py::arg("comm"))
      .def("set_custom_reduce_scatter", set_custom(&Unit::set_custom_reduce_scatter, /*sums=*/true), py::arg("comm"))
      .def(
          "set_all_reduce_hook",
          [](Unit& self, const py::object& hook) { self.set_all_reduce_hook(all_reduce_hook(hook)); }, py::arg("hook"))
      .def("plan_table", [](Unit& self) { return self.plan().table(); })
      .def("plan_json", [](Unit& self) { return self.plan().json(); })
      .def("counters", [](Unit& self) { return named(self.counters()); });

  module.def("share_comm_context", &share_comm_context, py::arg("units"));
}

} // namespace shardwise::bindings
