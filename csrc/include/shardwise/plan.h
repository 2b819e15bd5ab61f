#pragma once

#include <shardwise/export.h>

#include <cstdint>
#include <string>
#include <vector>

namespace shardwise {

/// What a unit and the units below it will do in a step: which parameters travel together, and how much.
struct SHARDWISE_API Plan {
  struct Group {
    std::string dtype;
    std::string device;
    int64_t parameters = 0;
    int64_t elements = 0;
    /// Bytes of this group's gradients, without the padding and the used counts.
    int64_t bytes = 0;
    /// Bytes of its bucket: gradients, padding and used counts.
    int64_t bucket_bytes = 0;
    /// Bytes of the parameters that this rank keeps: its shards, with their padding, or everything.
    int64_t shard_bytes = 0;
  };
  struct Unit {
    std::string name;
    std::string kind;
    std::vector<Group> groups;
  };
  std::string mesh;
  std::vector<Unit> units;

  std::string table() const;
  std::string json() const;
};

} // namespace shardwise
