#pragma once

#include <shardwise/estimate.h>
#include <shardwise/export.h>

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <optional>
#include <vector>

namespace shardwise::engine {

/// A model that is to be wrapped, as far as memory goes: sizes and an order. Nothing of it has to be there.
struct MemoryOutline {
  struct Parameter {
    std::vector<int64_t> sizes;
    at::ScalarType dtype = at::kFloat;
    /// Along which it is cut.
    int64_t dim = 0;
    /// Every rank keeps all of it, in a sharded unit too.
    bool whole = false;
    bool trained = true;
  };
  struct Unit {
    /// Numbers of its own parameters.
    std::vector<size_t> parameters;
    /// Of another unit; the outermost has none and comes last.
    std::optional<size_t> outer;
    /// Its modules compute with other memory than the optimizer sees.
    bool has_full_copies = true;
  };
  /// What happens in a forward: a unit begins, a parameter is used for the first time, a unit ends.
  struct Event {
    enum class Kind { begin, use, end };
    Kind kind;
    /// Of the unit or of the parameter.
    size_t number;
  };
  std::vector<Parameter> parameters;
  std::vector<Unit> units;
  std::vector<Event> forward;
  int64_t buffer_bytes = 0;
};

/// How it is to be wrapped, on how many ranks, and which of them is asked about.
struct MemoryPolicy {
  bool replicates = false;
  bool is_flat = false;
  MixedPrecision precision;
  std::optional<ReshardAfterForward> reshard;
  int64_t shards = 1;
  int64_t copies = 1;
  int64_t rank = 0;
  double optimizer_factor = 2;
  /// Averaged gradients that are no views of sums stay until the next ones, whatever the program does with them.
  bool keeps_means = false;
};

/// The policy's numbers from those of the user. Raises ValueError where they do not fit together.
SHARDWISE_API void set_ranks(MemoryPolicy& policy, int64_t world, int64_t copies, int64_t rank, double factor);

/// What training will need once a few steps are done.
SHARDWISE_API MemoryEstimate estimate(const MemoryOutline& outline, const MemoryPolicy& policy);

} // namespace shardwise::engine
