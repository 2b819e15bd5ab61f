#pragma once

#include <shardwise/detail/export.h>

#include <torch/arg.h>

#include <cstdint>

namespace shardwise {

/// What data travels over.
struct Link {
  double bytes_per_second = 0;
  /// What each collective takes besides, in seconds.
  double latency = 0;
};

/// The links of all ranks.
struct SHARDWISE_API Links {
  /// Within a host: a rank's own.
  TORCH_ARG(Link, inside);
  /// Between hosts: a host's own, which its ranks share.
  TORCH_ARG(Link, between);
  /// How many ranks a host has. 0: all are on one.
  TORCH_ARG(int64_t, ranks_per_host) = 0;
};

} // namespace shardwise
