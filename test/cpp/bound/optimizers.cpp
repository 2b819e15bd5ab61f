// AdamW, Adam and SGD for Python: made from parameters and options, with what they keep; and GradScaler.
#include "bound/optimizers.h"

#include "optim/optimizer_state.h"

#include <shardwise/grad_scaler.h>
#include <shardwise/optimizers.h>
#include <shardwise/save.h>
#include <shardwise/state_dict.h>

#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/optim.h>

#include <map>
#include <memory>
#include <stdexcept>

namespace {

namespace py = pybind11;
using shardwise::StateDict;
using shardwise::optim::OptimizerState;
using Dict = std::map<std::string, at::Tensor>;
using Optimizer = torch::optim::Optimizer;

StateDict state_dict(const Dict& values) {
  StateDict dict;
  for (const auto& [name, value] : values) dict.insert(name, value);
  return dict;
}

std::unique_ptr<Optimizer> empty_optimizer(const std::string& name, const std::vector<at::Tensor>& parameters) {
  if (name == "AdamW") return std::make_unique<shardwise::AdamW>(parameters);
  if (name == "Adam") return std::make_unique<shardwise::Adam>(parameters);
  if (name == "SGD") return std::make_unique<shardwise::SGD>(parameters, torch::optim::SGDOptions(0));
  throw std::invalid_argument(name);
}

std::shared_ptr<Optimizer> make(
    const std::string& name, const std::vector<at::Tensor>& parameters, const Dict& options) {
  std::shared_ptr<Optimizer> optimizer = empty_optimizer(name, parameters);
  OptimizerState(*optimizer).set_options(0, state_dict(options));
  return optimizer;
}

Dict values_in(const StateDict& dict) {
  Dict values;
  for (const auto& item : dict) values[item.key()] = item.value();
  return values;
}

Dict kept(Optimizer& optimizer, const at::Tensor& parameter) {
  Dict values;
  const auto state = OptimizerState(optimizer).get(parameter);
  for (const auto* part : {&state.tensors, &state.numbers}) {
    for (const auto& item : *part) values[item.key()] = item.value();
  }
  return values;
}

} // namespace

void bind_optimizers(py::module_& module) {
  py::class_<Optimizer, std::shared_ptr<Optimizer>>(module, "Optimizer")
      .def(py::init(&make))
      .def(
          "add_group",
          [](Optimizer& optimizer, const std::vector<at::Tensor>& parameters, const Dict& options) {
            optimizer.add_param_group(torch::optim::OptimizerParamGroup(parameters));
            OptimizerState(optimizer).set_options(optimizer.param_groups().size() - 1, state_dict(options));
          })
      .def("step", [](Optimizer& optimizer) { optimizer.step(); })
      .def("kept", &kept)
      .def(
          "full_state",
          [](Optimizer& optimizer, torch::nn::Module& module) {
            return values_in(shardwise::full_optimizer_state_dict(module, optimizer));
          })
      .def(
          "load_full_state",
          [](Optimizer& optimizer, torch::nn::Module& module, const Dict& values) {
            shardwise::load_full_optimizer_state_dict(module, optimizer, state_dict(values));
          })
      .def(
          "save",
          [](Optimizer& optimizer, const std::string& folder, torch::nn::Module& module,
             const shardwise::SavedValues& values) {
            shardwise::save(folder, module, optimizer, shardwise::SaveOptions().values(values));
          })
      .def("load", [](Optimizer& optimizer, const std::string& folder, torch::nn::Module& module) {
        return shardwise::load(folder, module, optimizer).values;
      });
  module.def("load", [](const std::string& file, torch::nn::Module& module, const std::string& entry) {
    return shardwise::load(file, module, shardwise::LoadOptions().entry(entry)).values;
  });
  py::class_<shardwise::GradScaler>(module, "GradScaler")
      .def(py::init([](double init_scale, int64_t growth_interval) {
        return shardwise::GradScaler(
            shardwise::GradScalerOptions().init_scale(init_scale).growth_interval(growth_interval));
      }))
      .def("scale", &shardwise::GradScaler::scale)
      .def("unscale_", &shardwise::GradScaler::unscale_)
      .def("step", [](shardwise::GradScaler& scaler, Optimizer& optimizer) { scaler.step(optimizer); })
      .def("update", [](shardwise::GradScaler& scaler) { scaler.update(); })
      .def("state", [](const shardwise::GradScaler& scaler) { return values_in(scaler.state_dict()); });
}
