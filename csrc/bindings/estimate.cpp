#include "bindings/bindings.h"

#include "engine/front_end.h"

#include <shardwise/estimate.h>

namespace shardwise::bindings {
namespace {

namespace py = pybind11;
using engine::MemoryOutline;

MemoryEstimate estimate_memory(
    const MemoryOutline& outline, const Options& options, int64_t world, bool replicates, int64_t copies, int64_t rank,
    double optimizer_factor, int64_t sums_in_flight, bool keeps_full, const std::optional<c10::Device>& device) {
  engine::MemoryPolicy policy{
      .replicates = replicates,
      .precision = options.precision,
      .reshard = options.reshard_after_forward,
      .sums_in_flight = sums_in_flight,
      .sums_in_stream = engine::sums_in_stream_on(device ? std::optional(device->type()) : std::nullopt),
      .keeps_full = keeps_full,
      // The DTensors that wrap gradients are used again, and keep them.
      .keeps_means = true};
  engine::set_ranks(policy, world, copies, rank, optimizer_factor);
  return engine::estimate(outline, policy);
}

} // namespace

void bind_estimate(py::module_& module) {
  py::class_<MemoryEstimate>(
      module, "MemoryEstimate",
      "Bytes of one rank's tensors; str() is a table with bars.\n\n"
      ">>> shardwise.estimate_memory(model, 8).backward_peak")
      .def_readonly("parameters", &MemoryEstimate::parameters)
      .def_readonly("buffers", &MemoryEstimate::buffers)
      .def_readonly("optimizer", &MemoryEstimate::optimizer)
      .def_readonly("gradients", &MemoryEstimate::gradients)
      .def_readonly("pool", &MemoryEstimate::pool)
      .def_readonly("unsummed_gradients", &MemoryEstimate::unsummed_gradients)
      .def_readonly("forward_peak", &MemoryEstimate::forward_peak)
      .def_readonly("backward_peak", &MemoryEstimate::backward_peak)
      .def_readonly("after_step", &MemoryEstimate::after_step)
      .def("json", &MemoryEstimate::json)
      .def("__repr__", &MemoryEstimate::table);
  using Kind = engine::StepEvent::Kind;
  const auto next = [](Kind kind) {
    return [kind](MemoryOutline& self, size_t number) { self.forward.push_back({kind, number}); };
  };
  py::class_<MemoryOutline>(module, "Outline", "A module, as an estimate of memory needs it.")
      .def(
          py::init([](int64_t buffer_bytes) {
            MemoryOutline outline;
            outline.buffer_bytes = buffer_bytes;
            return outline;
          }),
          py::arg("buffer_bytes"))
      .def(
          "add_parameter",
          [](MemoryOutline& self, std::vector<int64_t> sizes, at::ScalarType dtype, int64_t dim, bool whole,
             std::optional<at::ScalarType> full_dtype, bool trained) {
            self.parameters.push_back({std::move(sizes), dtype, dim, whole, full_dtype, trained});
          },
          py::kw_only(), py::arg("sizes"), py::arg("dtype"), py::arg("dim"), py::arg("whole"), py::arg("full_dtype"),
          py::arg("trained"))
      .def(
          "add_unit",
          [](MemoryOutline& self, std::vector<size_t> parameters, std::optional<size_t> outer, bool has_full_copies) {
            self.units.push_back({std::move(parameters), outer, has_full_copies});
          },
          py::kw_only(), py::arg("parameters"), py::arg("outer"), py::arg("has_full_copies"))
      .def("begin", next(Kind::begin), py::arg("unit"), "What comes next in a forward.")
      .def("use", next(Kind::use), py::arg("parameter"))
      .def("end", next(Kind::end), py::arg("unit"));
  module.def(
      "estimate_memory", &estimate_memory, py::arg("outline"), py::arg("options"), py::arg("world"), py::kw_only(),
      py::arg("replicates"), py::arg("copies"), py::arg("rank"), py::arg("optimizer_factor"),
      py::arg("reduce_scatter_max_input_buffers"), py::arg("keep_unsharded_storage"), py::arg("device"));
}

} // namespace shardwise::bindings
