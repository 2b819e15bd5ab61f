#pragma once

#include "comm/process_group.h"

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <string>
#include <vector>

namespace shardwise::comm {

/// What the ranks that came have to use, and what each of them had to say, by position.
struct Roll {
  c10::intrusive_ptr<c10d::Store> store;
  std::vector<std::string> texts;
};

/// Gives the ranks of a group that come here together a part of its store that is theirs alone. A store may outlive its
/// ranks, as torchrun's does, and then has the keys of all who came before: of earlier meshes, and of the attempt that
/// was restarted, however many nodes that had and whatever they count. So the first rank calls with a word that nobody
/// used before, and each of the others knows by the answer to its own such word that it is not an old call. Ranks come
/// here for one thing after the other in the same order. Texts have no zeros in them. Raises PeerError with the ranks
/// that did not come.
SHARDWISE_API Roll call_the_roll(const GroupSpec& spec, const std::string& text);

/// Returns when all have come here, over a store from call_the_roll(); the first rank after all others, since it may be
/// the one that serves the store. A rank that had its groups and went on, only to close them or to end, would break the
/// connections that others are still making. Raises PeerError.
SHARDWISE_API void meet(const GroupSpec& spec);

} // namespace shardwise::comm
