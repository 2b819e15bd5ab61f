#pragma once

namespace shardwise::comm {

/// Held by the one mesh that is made from the environment. The constructor raises ValueError if there is another.
class EnvironmentClaim {
 public:
  EnvironmentClaim();
  ~EnvironmentClaim();
  EnvironmentClaim(const EnvironmentClaim&) = delete;
  EnvironmentClaim& operator=(const EnvironmentClaim&) = delete;
};

} // namespace shardwise::comm
