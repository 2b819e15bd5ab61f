#pragma once

#include "bindings/bindings.h"

#include <shardwise/options.h>

#include <optional>

namespace shardwise::bindings {

/// What fully_shard(), replicate() and estimate_memory() all take from Python.
struct Options {
  MixedPrecision precision;
  std::optional<CpuOffload> offload;
  std::optional<ReshardAfterForward> reshard_after_forward;
};

/// None: unset.
std::optional<at::ScalarType> dtype_of(const pybind11::object& dtype);

} // namespace shardwise::bindings
