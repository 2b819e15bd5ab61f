#pragma once

#include "engine/step_walk.h"

#include <shardwise/detail/export.h>
#include <shardwise/estimate.h>

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <optional>
#include <vector>

namespace shardwise::engine {

/// What an estimate needs of a model before it is wrapped: sizes, and the order of use. The tensors need not exist.
struct MemoryOutline {
  struct Parameter {
    std::vector<int64_t> sizes;
    at::ScalarType dtype = at::kFloat;
    /// The dimension along which it is cut.
    int64_t dim = 0;
    /// Every rank keeps all of it, even in a sharded unit.
    bool whole = false;
    /// The dtype of its full copy, where it is not that of the policy.
    std::optional<at::ScalarType> full_dtype = std::nullopt;
    bool trained = true;
    /// Only embeddings have it: rows of it are looked up, which computes nothing.
    bool looked_up = false;
  };
  struct Unit {
    /// Its own parameters, as indices into `parameters`.
    std::vector<size_t> parameters;
    /// The index of the unit around it. The outermost unit has none, and comes last.
    std::optional<size_t> outer;
    /// Its modules compute with memory other than what the optimizer sees.
    bool has_full_copies = true;
  };
  /// What happens in a forward: a unit begins, a parameter is used for the first time, or a unit ends.
  struct Event {
    StepEvent::Kind kind;
    /// The index of the unit or parameter.
    size_t number;
  };
  std::vector<Parameter> parameters;
  std::vector<Unit> units;
  std::vector<Event> forward;
  int64_t buffer_bytes = 0;
};

/// How the model will be wrapped, on how many ranks, and the rank of the estimate.
struct MemoryPolicy {
  bool replicates = false;
  bool is_flat = false;
  MixedPrecision precision;
  std::optional<ReshardAfterForward> reshard;
  int64_t shards = 1;
  int64_t copies = 1;
  int64_t rank = 0;
  double optimizer_factor = 2;
  int64_t sums_in_flight = 1;
  /// It trains on a device that runs sums in a stream.
  bool sums_in_stream = false;
  /// Freed full copies keep their memory.
  bool keeps_full = false;
  /// Averaged gradients that are not views of sums stay until the next ones, whatever the program does with them.
  bool keeps_means = false;
};

/// Whether sums run in a stream on this kind of device; unset: on that of a mesh made here.
SHARDWISE_API bool sums_in_stream_on(std::optional<c10::DeviceType> device);

/// Sets the numbers of `policy` from what the user gave. Raises ValueError if they do not fit together.
SHARDWISE_API void set_ranks(MemoryPolicy& policy, int64_t world, int64_t copies, int64_t rank, double factor);

/// The memory that training will need once a few steps are done.
SHARDWISE_API MemoryEstimate estimate(const MemoryOutline& outline, const MemoryPolicy& policy);

/// The time that a step will take then. Raises ValueError for links that carry nothing, or a negative time.
SHARDWISE_API TimeEstimate
estimate_time(const MemoryOutline& outline, const MemoryPolicy& policy, const Links& links, double compute);

} // namespace shardwise::engine
