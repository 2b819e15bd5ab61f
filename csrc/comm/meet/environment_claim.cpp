#include "comm/meet/environment_claim.h"

#include <shardwise/error.h>

#include <atomic>

namespace shardwise::comm {
namespace {

std::atomic<bool>& taken() {
  static std::atomic<bool> value = false;
  return value;
}

} // namespace

EnvironmentClaim::EnvironmentClaim() {
  if (taken().exchange(true)) {
    throw ValueError(
        "shardwise: this process already has a mesh made from the environment. Copy that Mesh (or use Mesh::shared()), "
        "or shut it down before making another.");
  }
}

EnvironmentClaim::~EnvironmentClaim() {
  taken() = false;
}

} // namespace shardwise::comm
