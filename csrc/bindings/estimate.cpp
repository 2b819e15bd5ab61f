#include "bindings/options.h"

#include "engine/front_end.h"

#include <shardwise/estimate.h>

#include <pybind11/stl.h>

namespace shardwise::bindings {
namespace {

namespace py = pybind11;
using engine::MemoryOutline;

MemoryOutline::Parameter parameter(
    std::vector<int64_t> sizes, const py::object& dtype, int64_t dim, bool whole, const py::object& full_dtype,
    bool trained) {
  return {
      .sizes = std::move(sizes),
      .dtype = dtype_of(dtype).value(),
      .dim = dim,
      .whole = whole,
      .full_dtype = dtype_of(full_dtype),
      .trained = trained};
}

/// "begin" and "end" with the index of a unit, "use" with that of a parameter.
using Events = std::vector<std::pair<std::string, size_t>>;

MemoryOutline::Event event(const Events::value_type& given) {
  using Kind = MemoryOutline::Event::Kind;
  const auto kind = given.first == "begin" ? Kind::begin : given.first == "use" ? Kind::use : Kind::end;
  return {kind, given.second};
}

MemoryOutline make_outline(
    std::vector<MemoryOutline::Parameter> parameters, std::vector<MemoryOutline::Unit> units, const Events& forward,
    int64_t buffer_bytes) {
  MemoryOutline outline{
      .parameters = std::move(parameters), .units = std::move(units), .forward = {}, .buffer_bytes = buffer_bytes};
  for (const auto& each : forward) outline.forward.push_back(event(each));
  return outline;
}

MemoryEstimate estimate_memory(
    const MemoryOutline& outline, const Options& options, int64_t world, const EstimateOptions& more, bool replicates) {
  engine::MemoryPolicy policy{
      .replicates = replicates,
      .precision = options.precision,
      .reshard = options.reshard_after_forward,
      .sums_in_flight = more.reduce_scatter_max_input_buffers(),
      .sums_in_stream = engine::sums_in_stream_on(more.device()),
      .keeps_full = more.keep_unsharded_storage(),
      // The DTensors that wrap gradients are used again, and keep them.
      .keeps_means = true};
  engine::set_ranks(policy, world, more.copies(), more.rank(), more.optimizer_factor());
  return engine::estimate(outline, policy);
}

} // namespace

void bind_estimate(py::module_& module) {
  py::class_<MemoryOutline::Parameter>(module, "OutlineParameter", "A parameter, as an estimate of memory needs it.")
      .def(
          py::init(&parameter), py::kw_only(), py::arg("sizes"), py::arg("dtype"), py::arg("dim"), py::arg("whole"),
          py::arg("full_dtype"), py::arg("trained"));
  py::class_<MemoryOutline::Unit>(module, "OutlineUnit", "A unit, as an estimate of memory needs it.")
      .def(
          py::init([](std::vector<size_t> parameters, std::optional<size_t> outer, bool has_full_copies) {
            return MemoryOutline::Unit{std::move(parameters), outer, has_full_copies};
          }),
          py::kw_only(), py::arg("parameters"), py::arg("outer"), py::arg("has_full_copies"));
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
  py::class_<MemoryOutline>(module, "Outline", "A module, as an estimate of memory needs it.")
      .def(
          py::init(&make_outline), py::kw_only(), py::arg("parameters"), py::arg("units"), py::arg("forward"),
          py::arg("buffer_bytes"));
  py::class_<EstimateOptions>(module, "EstimateOptions", "More options of an estimate.")
      .def(
          py::init([](int64_t copies, int64_t rank, double optimizer_factor, int64_t max_input_buffers, bool keep,
                      std::optional<c10::Device> device) {
            return EstimateOptions()
                .device(device ? std::optional(device->type()) : std::nullopt)
                .copies(copies)
                .rank(rank)
                .optimizer_factor(optimizer_factor)
                .reduce_scatter_max_input_buffers(max_input_buffers)
                .keep_unsharded_storage(keep);
          }),
          py::kw_only(), py::arg("copies"), py::arg("rank"), py::arg("optimizer_factor"),
          py::arg("reduce_scatter_max_input_buffers"), py::arg("keep_unsharded_storage"), py::arg("device"));
  module.def(
      "estimate_memory", &estimate_memory, py::arg("outline"), py::arg("options"), py::arg("world"), py::arg("more"),
      py::kw_only(), py::arg("replicates"));
}

} // namespace shardwise::bindings
