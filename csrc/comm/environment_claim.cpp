#include "comm/environment_claim.h"

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
        "shardwise: there is a mesh from the environment already. A process joins its job once: keep the first "
        "Mesh and copy it, or shut it down before making another.");
  }
}

EnvironmentClaim::~EnvironmentClaim() {
  taken() = false;
}

} // namespace shardwise::comm
