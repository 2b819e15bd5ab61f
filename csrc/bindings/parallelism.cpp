// Tensor and pipeline parallelism for C++ modules that torch::python::bind_module exposes to Python.
#include "bindings/bindings.h"

#include "python_front/kept_object.h"

#include <shardwise/parallelize.h>
#include <shardwise/pipeline.h>

#include <torch/csrc/autograd/variable.h>
#include <torch/nn/module.h>

#include <map>

namespace shardwise::bindings {
namespace {

namespace py = pybind11;
using python_front::KeptObject;
using ModulePointer = std::shared_ptr<torch::nn::Module>;
using Tensors = Pipeline::Tensors;

// Of a tensor that has a dictionary of hooks already, Python clears no hooks.
void keep_later_hooks(const torch::nn::Module& module) {
  const auto dictionary = py::module_::import("collections").attr("OrderedDict");
  for (const auto& parameter : module.parameters()) {
    if (!torch::autograd::impl::hooks(parameter).empty()) continue;
    py::cast(parameter).attr("_backward_hooks") = dictionary();
  }
}

TensorParallel divide(
    const ModulePointer& module, const Mesh& mesh, const std::string& axis, const SplitPlan& plan, bool broadcast,
    bool allow_aliases) {
  keep_later_hooks(*module);
  const py::gil_scoped_release no_gil;
  return parallelize(*module, mesh, axis, plan, ParallelizeOptions().broadcast(broadcast).allow_aliases(allow_aliases));
}

Split make_split(
    const std::string& kind, bool gather_output, bool split_input, int64_t segments, std::optional<int64_t> heads,
    std::optional<int64_t> sequence_dim, bool transposed) {
  static const std::map<std::string, Split> kinds{
      {"colwise", colwise()}, {"rowwise", rowwise()}, {"vocabulary", vocabulary()}, {"sequence", sequence()}};
  auto split = kinds.at(kind);
  return split.gather_output(gather_output)
      .split_input(split_input)
      .segments(segments)
      .heads(heads)
      .sequence_dim(sequence_dim)
      .transposed(transposed);
}

/// What a function of Python's returned; None is an undefined tensor.
Tensors tensors_of(const py::handle& values) {
  Tensors tensors;
  for (const auto& value : values) tensors.push_back(value.is_none() ? at::Tensor() : value.cast<at::Tensor>());
  return tensors;
}

PipelineOptions make_pipeline_options(
    const std::string& schedule, int64_t microbatches, int64_t stages_per_rank, const py::object& loss, bool mean,
    bool gather_once) {
  // torch's names.
  static const std::map<std::string, PipelineSchedule> schedules{
      {"GPipe", PipelineSchedule::gpipe},
      {"1F1B", PipelineSchedule::one_forward_one_backward},
      {"Interleaved1F1B", PipelineSchedule::interleaved},
      {"LoopedBFS", PipelineSchedule::looped_bfs},
      {"InterleavedZeroBubble", PipelineSchedule::interleaved_zero_bubble},
      {"ZBVZeroBubble", PipelineSchedule::zero_bubble_v},
      {"DualPipeV", PipelineSchedule::dual_pipe_v}};
  auto options = PipelineOptions()
                     .schedule(schedules.at(schedule))
                     .microbatches(microbatches)
                     .stages_per_rank(stages_per_rank)
                     .mean(mean)
                     .gather_once(gather_once);
  if (!loss.is_none()) {
    options.loss([loss = KeptObject(loss)](const Tensors& outputs, const Tensors& targets) {
      const py::gil_scoped_acquire gil;
      return loss.get()(outputs, targets).cast<at::Tensor>();
    });
  }
  return options;
}

/// `make` gives for the number of a stage a function of a list of tensors, which returns one, and the C++ module.
std::unique_ptr<Pipeline> make_pipeline(
    const Mesh& mesh, const std::string& axis, const py::function& make, const PipelineOptions& options) {
  const auto stage = [&make](int64_t number) {
    const auto made = make(number).cast<std::pair<py::object, ModulePointer>>();
    auto forward = [function = KeptObject(made.first)](const Tensors& inputs) {
      const py::gil_scoped_acquire gil;
      return tensors_of(function.get()(inputs));
    };
    return PipelineStage(std::move(forward), made.second);
  };
  return std::make_unique<Pipeline>(mesh, axis, stage, options);
}

/// step() or evaluate(), which returns losses and outputs.
auto running(PipelineResult (Pipeline::*run)(const Tensors&, const Tensors&)) {
  return [run](Pipeline& self, const Tensors& inputs, const Tensors& targets) {
    auto result = (self.*run)(inputs, targets);
    return std::pair(std::move(result.losses), std::move(result.outputs));
  };
}

} // namespace

void bind_parallelism(py::module_& module) {
  py::class_<Split>(module, "Split", "How the ranks along an axis divide a layer of a C++ module.")
      .def(
          py::init(&make_split), py::kw_only(), py::arg("kind"), py::arg("gather_output") = false,
          py::arg("split_input") = false, py::arg("segments") = 1, py::arg("heads") = py::none(),
          py::arg("sequence_dim") = py::none(), py::arg("transposed") = false);
  py::class_<TensorParallel>(module, "TensorParallel", "What parallelize() did.")
      .def("table", &TensorParallel::table, "A line for each parameter: its name, its sizes, this rank's piece.")
      .def(
          "counters", [](const TensorParallel& self) { return named(self.counters()); },
          "The collectives along the axis so far, by name.");
  module.def(
      "parallelize", &divide, py::arg("module"), py::arg("mesh"), py::arg("axis"), py::arg("plan"), py::kw_only(),
      py::arg("broadcast"), py::arg("allow_aliases"));

  py::class_<PipelineOptions>(module, "PipelineOptions", "How a pipeline works.")
      .def(
          py::init(&make_pipeline_options), py::kw_only(), py::arg("schedule"), py::arg("microbatches"),
          py::arg("stages_per_rank"), py::arg("loss"), py::arg("mean"), py::arg("gather_once"));
  py::class_<Pipeline>(module, "Pipeline", "Stages of C++ modules on the ranks along an axis.")
      .def(py::init(&make_pipeline), py::arg("mesh"), py::arg("axis"), py::arg("make"), py::arg("options"))
      .def_static("stages_of", &Pipeline::stages_of, py::arg("mesh"), py::arg("axis"), py::arg("options"))
      .def_property_readonly("stages", &Pipeline::stages)
      .def("step", running(&Pipeline::step), NoGil(), py::arg("inputs"), py::arg("targets"))
      .def("evaluate", running(&Pipeline::evaluate), NoGil(), py::arg("inputs"), py::arg("targets"))
      .def("table", &Pipeline::table)
      .def("bubble", &Pipeline::bubble);
}

} // namespace shardwise::bindings
