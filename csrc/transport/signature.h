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
  /// Not a collective: the rank runs no more of them.
  end_notice
};

/// What a rank is about to call. All ranks must agree on it.
struct Signature {
  Kind kind = Kind::barrier;
  c10d::ReduceOp::RedOpType op = c10d::ReduceOp::UNUSED;
  at::ScalarType dtype = at::ScalarType::Undefined;
  /// Elements of one rank's input (of its output, if only the root has an input); -1 if ranks may differ.
  int64_t elements = -1;
  int64_t root = -1;
  /// All-gathers with direct placement: in how many pieces the data travels, over all ranks; else 0.
  int64_t pieces = 0;

  bool operator==(const Signature&) const = default;
  /// For example: an all-reduce (sum) of 16 elements of Float
  std::string describe() const;
};

} // namespace shardwise::transport
