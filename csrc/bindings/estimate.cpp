#include "bindings/bindings.h"

#include "engine/front_end.h"

#include <shardwise/estimate.h>

namespace shardwise::bindings {
namespace {

namespace py = pybind11;
using engine::MemoryOutline;

using engine::MemoryPolicy;

MemoryPolicy make_policy(
    const Options& options, int64_t world, bool replicates, int64_t copies, int64_t rank, double optimizer_factor,
    int64_t sums_in_flight, bool keeps_full, const std::optional<c10::Device>& device) {
  MemoryPolicy policy{
      .replicates = replicates,
      .precision = options.precision,
      .reshard = options.reshard_after_forward,
      .sums_in_flight = sums_in_flight,
      .sums_in_stream = engine::sums_in_stream_on(device ? std::optional(device->type()) : std::nullopt),
      .keeps_full = keeps_full,
      // The DTensors that wrap gradients are used again, and keep them.
      .keeps_means = true};
  engine::set_ranks(policy, world, copies, rank, optimizer_factor);
  return policy;
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
  py::class_<Link>(
      module, "Link",
      "What data travels over: how many bytes a second, and the seconds that each collective takes besides.\n\n"
      ">>> shardwise.Link(450e9, latency=10e-6)")
      .def(
          py::init([](double bytes_per_second, double latency) {
            return Link{bytes_per_second, latency};
          }),
          py::arg("bytes_per_second"), py::arg("latency") = 0.0)
      .def_readonly("bytes_per_second", &Link::bytes_per_second)
      .def_readonly("latency", &Link::latency);
  py::class_<TimeEstimate>(
      module, "TimeEstimate",
      "Seconds of one step of a rank; str() is a table with bars.\n\n"
      ">>> shardwise.estimate_time(model, 8, link=shardwise.Link(25e9), compute=0.12).step")
      .def_readonly("compute", &TimeEstimate::compute)
      .def_readonly("wire", &TimeEstimate::wire)
      .def_readonly("step", &TimeEstimate::step)
      .def("json", &TimeEstimate::json)
      .def("__repr__", &TimeEstimate::table);
  py::class_<MemoryPolicy>(module, "Policy", "How a module will be wrapped, and on how many ranks, for an estimate.")
      .def(
          py::init(&make_policy), py::arg("options"), py::arg("world"), py::kw_only(), py::arg("replicates"),
          py::arg("copies"), py::arg("rank"), py::arg("optimizer_factor"), py::arg("reduce_scatter_max_input_buffers"),
          py::arg("keep_unsharded_storage"), py::arg("device"));
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
             std::optional<at::ScalarType> full_dtype, bool trained, bool looked_up) {
            self.parameters.push_back({std::move(sizes), dtype, dim, whole, full_dtype, trained, looked_up});
          },
          py::kw_only(), py::arg("sizes"), py::arg("dtype"), py::arg("dim"), py::arg("whole"), py::arg("full_dtype"),
          py::arg("trained"), py::arg("looked_up"))
      .def(
          "add_unit",
          [](MemoryOutline& self, std::vector<size_t> parameters, std::optional<size_t> outer, bool has_full_copies) {
            self.units.push_back({std::move(parameters), outer, has_full_copies});
          },
          py::kw_only(), py::arg("parameters"), py::arg("outer"), py::arg("has_full_copies"))
      .def("begin", next(Kind::begin), py::arg("unit"), "What comes next in a forward.")
      .def("use", next(Kind::use), py::arg("parameter"))
      .def("end", next(Kind::end), py::arg("unit"));
  module.def("estimate_memory", &engine::estimate, py::arg("outline"), py::arg("policy"));
  module.def(
      "estimate_time",
      [](const MemoryOutline& outline, const MemoryPolicy& policy, const Link& inside,
         const std::optional<Link>& between, int64_t ranks_per_host, double compute) {
        const auto links = Links().inside(inside).between(between.value_or(Link())).ranks_per_host(ranks_per_host);
        return engine::estimate_time(outline, policy, links, compute);
      },
      py::arg("outline"), py::arg("policy"), py::kw_only(), py::arg("inside"), py::arg("between"),
      py::arg("ranks_per_host"), py::arg("compute"));
}

} // namespace shardwise::bindings
