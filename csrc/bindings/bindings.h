#pragma once

// Includes torch's own pybind11 with its converters for tensors and intrusive pointers: far cheaper than
// torch/extension.h.
#include <ATen/core/Tensor.h>

#include <shardwise/counters.h>
#include <shardwise/options.h>

#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <map>
#include <optional>
#include <string>

namespace shardwise::bindings {

void bind_mesh(pybind11::module_& module);
void bind_options(pybind11::module_& module);
void bind_handle(pybind11::module_& module);
void bind_unit(pybind11::module_& module);
void bind_cpp_modules(pybind11::module_& module);
void bind_estimate(pybind11::module_& module);
void bind_checkpoint(pybind11::module_& module);
void bind_parallelism(pybind11::module_& module);

/// The options that fully_shard(), replicate() and estimate_memory() have in common in Python.
struct Options {
  MixedPrecision precision;
  std::optional<CpuOffload> offload;
  std::optional<ReshardAfterForward> reshard_after_forward;
};

/// Numbers by name.
std::map<std::string, int64_t> named(const Counters& counters);

/// For everything that may talk to other ranks, and must not hold the GIL meanwhile.
using NoGil = pybind11::call_guard<pybind11::gil_scoped_release>;

} // namespace shardwise::bindings
