#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>

namespace shardwise::comm {

/// The part of a store for the next mesh over it. Ranks that make their meshes in the same order agree on it.
c10::intrusive_ptr<c10d::Store> part_for_next_mesh(const c10::intrusive_ptr<c10d::Store>& store, int rank);

/// Returns when all ranks have come here, on rank 0 after all others, since it may be the one that serves the store.
/// A rank that had its groups and went on, only to close them or to end, would break the connections that others are
/// still making. Raises PeerError.
void meet(c10d::Store& store, int rank, int world_size, std::chrono::milliseconds timeout);

} // namespace shardwise::comm
