#pragma once

#include <shardwise/export.h>

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
  /// Collectives of one kind in a step, and the bytes that this rank hands to them, counted as Counters does.
  struct Traffic {
    int64_t calls = 0;
    int64_t bytes = 0;

    Traffic& operator+=(const Traffic& other);
  };
  /// Parameters of a unit that travel together.
  struct Group {
    /// The dtypes of parameters and shards, of what the module computes with, and of the sums of gradients.
    std::string dtype;
    std::string compute_dtype;
    std::string reduce_dtype;
    /// Where the parameters or shards are.
    std::string device;
    /// "rows" or "flat"; "replicated" if every rank has everything; "extended" for parameters with their own way to
    /// travel.
    std::string layout;
    int64_t parameters = 0;
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
    Traffic forward_gathers;
    Traffic backward_gathers;
    Traffic reduce_scatters;
    Traffic all_reduces;
  };
  struct Unit {
    std::string name;
    std::string kind;
    /// The mesh's axes and their sizes, the slowest first.
    std::vector<std::pair<std::string, int64_t>> axes;
    /// When full copies are freed: "after forward", "to 4 ranks after forward" (4 ranks keep them between them), "after
    /// backward", "never", or "-" if there are none.
    std::string reshard;
    std::vector<Group> groups;
  };
  std::string mesh;
  std::vector<Unit> units;

  std::string table() const;
  std::string json() const;
};

} // namespace shardwise
