#pragma once

namespace shardwise::comm {

/// Held by the one mesh that is made from the environment. Raises ValueError where another one is.
class EnvironmentClaim {
 public:
  EnvironmentClaim();
  ~EnvironmentClaim();
  EnvironmentClaim(const EnvironmentClaim&) = delete;
  EnvironmentClaim& operator=(const EnvironmentClaim&) = delete;
};

} // namespace shardwise::comm
