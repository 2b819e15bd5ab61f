// The Python module bound_models: models of the rank tests, bound as torch documents it, optimizers, and process groups
// made in C++.
#include "bound/optimizers.h"
#include "ranks/fully_shard_models.h"
#include "ranks/training_models.h"

#include <shardwise/activation_checkpoint.h>
#include <shardwise/mesh.h>

#include <torch/csrc/utils/pybind.h>
#include <torch/python.h>

#include <pybind11/chrono.h>
#include <pybind11/stl.h>

namespace {

namespace py = pybind11;
using namespace shardwise::test;

/// A container, whose calls can be seen.
struct ChainImpl : torch::nn::Module {
  ChainImpl(int64_t width, int count) : layers(register_module("layers", mlps(width, count, /*linear_first=*/true))) {}
  torch::Tensor forward(const torch::Tensor& x) {
    return layers->forward(x);
  }
  torch::nn::Sequential layers;
};

/// Computes its layers again in backward.
struct AgainImpl : torch::nn::Module {
  explicit AgainImpl(int64_t width) : layers(register_module("layers", mlps(width, 2, /*linear_first=*/true))) {}
  torch::Tensor forward(const torch::Tensor& x) {
    return shardwise::activation_checkpoint([this](const torch::Tensor& inner) { return layers->forward(inner); }, x);
  }
  torch::nn::Sequential layers;
};

shardwise::Mesh make_mesh(
    const c10::intrusive_ptr<c10d::Store>& store, int rank, const std::vector<std::pair<std::string, int64_t>>& named) {
  std::vector<shardwise::Axis> axes;
  int64_t size = 1;
  for (const auto& [name, length] : named) {
    axes.push_back({name, length});
    size *= length;
  }
  return shardwise::Mesh(
      axes,
      shardwise::MeshOptions().store(store).rank(rank).world_size(static_cast<int>(size)).device(at::Device(at::kCPU)));
}

} // namespace

PYBIND11_MODULE(bound_models, module) {
  torch::python::bind_module<BlockImpl>(module, "Block").def("reversed", &BlockImpl::reversed);
  torch::python::bind_module<StackImpl>(module, "Stack")
      .def(py::init<int64_t, int64_t, bool>(), py::arg("width") = 6, py::arg("depth") = 3, py::arg("tied") = false)
      .def("block", [](StackImpl& stack, size_t index) { return stack.block(index).ptr(); });
  torch::python::bind_module<ChainImpl>(module, "Chain").def(py::init<int64_t, int>());
  torch::python::bind_module<AgainImpl>(module, "Again")
      .def(py::init<int64_t>())
      .def("layer", [](AgainImpl& model, size_t index) { return model.layers->ptr(index); });
  bind_optimizers(module);
  module.def("make_mesh", &make_mesh, py::call_guard<py::gil_scoped_release>());
}
