#pragma once

#include "comm/mesh/process_group.h"

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <string>
#include <vector>

namespace shardwise::comm {

/// What rendezvous() returns: a store to use from then on, and each rank's text, by position.
struct Rendezvous {
  c10::intrusive_ptr<c10d::Store> store;
  std::vector<std::string> texts;
};

/// Gives the ranks of a group a part of its store that only they use. All of them call it, in the same order if for
/// several purposes. A store may outlive its ranks, as torchrun's does, and then holds keys of earlier meshes, and of
/// an earlier attempt, perhaps with another number of nodes. So the first rank calls with a fresh random word, each
/// other rank answers with one of its own, and a call that repeats a rank's word is known to be new. Texts must not
/// contain zeros. Raises a PeerError that names the ranks that did not come.
SHARDWISE_API Rendezvous rendezvous(const GroupSpec& spec, const std::string& text);

/// Returns when all ranks have called it, over a store from rendezvous(). The first rank returns last, since it may
/// serve the store. Without this, a rank that has its groups and ends, or closes them, would break connections that
/// others are still making. Raises PeerError.
SHARDWISE_API void store_barrier(const GroupSpec& spec);

} // namespace shardwise::comm
