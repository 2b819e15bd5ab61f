#include "bindings/bindings.h"

#include "python_front/kept_object.h"

#include <variant>

namespace shardwise::bindings {
namespace {

namespace py = pybind11;

/// Unset for None.
using Dtype = std::optional<at::ScalarType>;

MixedPrecision::Override override_of(const py::object& choose) {
  if (choose.is_none()) return {};
  return [choose = python_front::KeptObject(choose)](const std::string& name, const at::Tensor& parameter) {
    const py::gil_scoped_acquire gil;
    return choose.get()(name, parameter).cast<Dtype>();
  };
}

Options make_options(
    Dtype param_dtype, const py::object& param_dtype_override, Dtype reduce_dtype, Dtype output_dtype,
    bool cast_forward_inputs, std::optional<bool> pin_memory,
    const std::optional<std::variant<bool, int>>& reshard_after_forward) {
  Options options{
      .precision = MixedPrecision()
                       .param_dtype(param_dtype)
                       .param_dtype_override(override_of(param_dtype_override))
                       .reduce_dtype(reduce_dtype)
                       .output_dtype(output_dtype)
                       .cast_forward_inputs(cast_forward_inputs),
      .offload = std::nullopt,
      .reshard_after_forward = std::nullopt};
  if (pin_memory) options.offload = CpuOffload().pin_memory(*pin_memory);
  if (reshard_after_forward) {
    options.reshard_after_forward =
        std::visit([](auto value) { return ReshardAfterForward(value); }, *reshard_after_forward);
  }
  return options;
}

} // namespace

void bind_options(py::module_& module) {
  py::class_<Options>(
      module, "Options", "The user's options; `pin_memory` is for shards on the host, None if they are not there.")
      .def(
          py::init(&make_options), py::kw_only(), py::arg("param_dtype"), py::arg("param_dtype_override"),
          py::arg("reduce_dtype"), py::arg("output_dtype"), py::arg("cast_forward_inputs"), py::arg("pin_memory"),
          py::arg("reshard_after_forward"));
}

} // namespace shardwise::bindings
