#pragma once

#include <c10/core/ScalarType.h>
#include <torch/csrc/distributed/c10d/Types.hpp>

#include <cstdint>
#include <string>

namespace shardwise::transport {

enum class Kind : uint8_t {
  all_gather,
  reduce_scatter,
  all_reduce,
  broadcast,
  reduce,
  gather,
  scatter,
  all_to_all,
  barrier,
  /// Not a collective: the rank goes no further.
  farewell
};

/// What a rank is about to do, as the other ranks must do it too.
struct Signature {
  Kind kind = Kind::barrier;
  c10d::ReduceOp::RedOpType op = c10d::ReduceOp::UNUSED;
  at::ScalarType dtype = at::ScalarType::Undefined;
  /// Of one rank's input, or output where only the root has an input; -1 where ranks may differ.
  int64_t elements = -1;
  int64_t root = -1;
  /// Of an all-gather: in how many pieces what is sent travels, over all ranks, where that is not one for each.
  int64_t pieces = 0;

  bool operator==(const Signature&) const = default;
  /// For example: an all-reduce (sum) of 16 elements of Float
  std::string describe() const;
};

} // namespace shardwise::transport
