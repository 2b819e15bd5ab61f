#pragma once

#include "bindings/bindings.h"

#include <shardwise/options.h>

#include <optional>

namespace shardwise::bindings {

/// The options that fully_shard(), replicate() and estimate_memory() have in common in Python.
struct Options {
  MixedPrecision precision;
  std::optional<CpuOffload> offload;
  std::optional<ReshardAfterForward> reshard_after_forward;
};

/// Unset for None.
std::optional<at::ScalarType> dtype_of(const pybind11::object& dtype);

} // namespace shardwise::bindings
