#pragma once

#include <shardwise/detail/export.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace shardwise {

/// What a unit and the units below it will do in a step: which parameters travel together, how they are laid out, and
/// how much travels.
///
/// A step is one forward of every unit, in calls that fire hooks (hooks.h), one backward that gives all trained
/// parameters a gradient, and an optimizer that changes them. The end of a direct call fires no hook, so the unit that
/// ran last may keep its full parameters until backward: one all-gather less.
struct SHARDWISE_API Plan {
  /// The collectives of one kind in a step.
  struct Traffic {
    /// How many there are.
    int64_t calls = 0;
    /// Bytes that this rank hands to them, counted as Counters does.
    int64_t bytes = 0;

    /// Adds the other's calls and bytes.
    Traffic& operator+=(const Traffic& other);
  };
  /// Parameters of a unit that travel together.
  struct Group {
    /// The dtype of parameters and shards.
    std::string dtype;
    /// The dtype in which the module computes.
    std::string compute_dtype;
    /// The dtype in which gradients are summed.
    std::string reduce_dtype;
    /// Where the parameters or shards are.
    std::string device;
    /// "rows" or "flat"; "replicated" if every rank has everything; "extended" for parameters with their own way to
    /// travel.
    std::string layout;
    /// How many parameters there are.
    int64_t parameters = 0;
    /// How many elements they have, whole and without padding.
    int64_t elements = 0;
    /// Bytes of these parameters, whole and without padding.
    int64_t bytes = 0;
    /// Bytes of this rank's part of them: its shards with their padding, or everything.
    int64_t shard_bytes = 0;
    /// How many of those are padding.
    int64_t padding_bytes = 0;
    /// Bytes of the full copies while they have memory; 0 if the module computes with parameters() themselves.
    int64_t full_bytes = 0;
    /// Bytes of the bucket: gradients, padding, and the counts of use.
    int64_t bucket_bytes = 0;
    /// All-gathers of parameters for the forward.
    Traffic forward_gathers;
    /// All-gathers of parameters for the backward, if they were freed after the forward.
    Traffic backward_gathers;
    /// Sums of gradients that leave each rank its part.
    Traffic reduce_scatters;
    /// Sums of gradients over ranks with copies of the same parameters or shards.
    Traffic all_reduces;
  };
  /// One call of replicate() or fully_shard().
  struct Unit {
    /// The name that shardwise::Unit::name() gives.
    std::string name;
    /// "replicate" or "fully_shard".
    std::string kind;
    /// The mesh's axes and their sizes, the slowest first.
    std::vector<std::pair<std::string, int64_t>> axes;
    /// When full copies are freed: "after forward", "to 4 ranks after forward" (4 ranks keep them between them), "after
    /// backward", "never", or "-" if there are none.
    std::string reshard;
    /// Its parameters, by dtype and device.
    std::vector<Group> groups;
  };
  /// The mesh of the unit, as Mesh::describe() gives it.
  std::string mesh;
  /// The unit and those below it, in the order of wrapping.
  std::vector<Unit> units;

  /// A line for each group, and one for their sum; sizes are in megabytes.
  std::string table() const;
  /// One JSON object, whose keys are the names of these members.
  std::string json() const;
};

} // namespace shardwise
