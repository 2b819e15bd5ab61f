// The C++ front end for C++ modules that torch::python::bind_module exposes to Python.
#include "bindings/bindings.h"

#include "python_front/kept_object.h"

#include <shardwise/clip_grad_norm.h>
#include <shardwise/detail/hooks.h>
#include <shardwise/error.h>
#include <shardwise/fully_shard.h>
#include <shardwise/replicate.h>
#include <shardwise/state_dict.h>

#include <torch/nn/module.h>

namespace shardwise::bindings {
namespace {

namespace py = pybind11;
using detail::HookedCall;
using Modules = std::vector<std::shared_ptr<torch::nn::Module>>;

FullyShardOptions::Placement placement_of(const py::object& placement) {
  if (placement.is_none()) return {};
  return [placement = python_front::KeptObject(placement)](const std::string& name, const at::Tensor& parameter) {
    const py::gil_scoped_acquire gil;
    return placement.get()(name, parameter).cast<std::optional<int64_t>>();
  };
}

Unit shard(
    const Modules& modules, const Mesh& mesh, const Options& given, const py::object& placement,
    std::vector<at::Tensor> ignored) {
  const auto options = FullyShardOptions()
                           .mesh(mesh)
                           .shard_placement(placement_of(placement))
                           .mixed_precision(given.precision)
                           .cpu_offload(given.offload)
                           .reshard_after_forward(given.reshard_after_forward)
                           .ignored_parameters(std::move(ignored));
  const py::gil_scoped_release no_gil;
  return fully_shard(modules, options);
}

Unit copy_to_all(const Modules& modules, const Mesh& mesh, const Options& given, std::vector<at::Tensor> ignored) {
  const auto options = ReplicateOptions()
                           .mesh(mesh)
                           .mixed_precision(given.precision)
                           .cpu_offload(given.offload)
                           .ignored_parameters(std::move(ignored));
  const py::gil_scoped_release no_gil;
  return replicate(modules, options);
}

std::optional<Unit> unit_of(const torch::nn::Module& module) {
  try {
    return unit(module);
  } catch (const ValueError&) {
    return std::nullopt;
  }
}

py::dict full_values(const torch::nn::Module& module, bool rank0_only, bool cpu_offload) {
  StateDict values;
  {
    const py::gil_scoped_release no_gil;
    values = full_state_dict(module, FullStateDictOptions().rank0_only(rank0_only).cpu_offload(cpu_offload));
  }
  py::dict result;
  for (const auto& entry : values) result[py::str(entry.key())] = entry.value();
  return result;
}

std::tuple<std::vector<std::string>, std::vector<std::string>, int64_t> load_full_values(
    torch::nn::Module& module, const py::dict& values, bool strict, bool broadcast_from_rank0) {
  StateDict dict;
  for (const auto& [name, value] : values) dict.insert(name.cast<std::string>(), value.cast<at::Tensor>());
  const py::gil_scoped_release no_gil;
  auto loaded = load_full_state_dict(
      module, dict, LoadStateDictOptions().strict(strict).broadcast_from_rank0(broadcast_from_rank0));
  return {std::move(loaded.missing), std::move(loaded.unexpected), loaded.elements};
}

} // namespace

void bind_cpp_modules(py::module_& module) {
  // What shardwise::call() does around forward.
  const auto replacing = [](void (HookedCall::*act)(HookTensors&)) {
    return [act](HookedCall& self, HookTensors tensors) {
      (self.*act)(tensors);
      return tensors;
    };
  };
  py::class_<HookedCall>(module, "Call", "A call of a C++ module that fires its hooks.")
      .def(py::init<torch::nn::Module&>(), py::keep_alive<1, 2>(), py::arg("module"))
      .def("begin", replacing(&HookedCall::begin), NoGil(), py::arg("inputs"))
      .def("end", replacing(&HookedCall::end), NoGil(), py::arg("outputs"))
      .def("fail", &HookedCall::fail, NoGil());

  module.def(
      "fully_shard", &shard, py::arg("modules"), py::arg("mesh"), py::arg("options"), py::kw_only(),
      py::arg("placement"), py::arg("ignored"));
  module.def(
      "replicate", &copy_to_all, py::arg("modules"), py::arg("mesh"), py::arg("options"), py::kw_only(),
      py::arg("ignored"));
  module.def("cpp_unit", &unit_of, py::arg("module"), "The handle of the call that wrapped this C++ module.");
  module.def(
      "full_state_dict", &full_values, py::arg("module"), py::kw_only(), py::arg("rank0_only"), py::arg("cpu_offload"));
  module.def(
      "load_full_state_dict", &load_full_values, py::arg("module"), py::arg("values"), py::kw_only(), py::arg("strict"),
      py::arg("broadcast_from_rank0"));
  module.def(
      "clip_grad_norm_",
      [](const std::vector<at::Tensor>& parameters, double max_norm, double norm_type, bool error_if_nonfinite) {
        return clip_grad_norm_(parameters, max_norm, norm_type, error_if_nonfinite);
      },
      NoGil(), py::arg("parameters"), py::arg("max_norm"), py::kw_only(), py::arg("norm_type"),
      py::arg("error_if_nonfinite"));
}

} // namespace shardwise::bindings
