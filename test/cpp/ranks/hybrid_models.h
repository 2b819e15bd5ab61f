#pragma once

// Meshes of two axes: copies of shards.
#include "ranks/fully_shard_models.h"

namespace shardwise::test {

/// The number of copies, and of shards of each.
struct Grid {
  int64_t copies;
  int64_t shards;

  int world() const {
    return static_cast<int>(copies * shards);
  }
  std::string name() const {
    return c10::str(copies, " copies of ", shards, " shards");
  }
};

inline FullyShardOptions hybrid_on(Rank& rank, Grid grid) {
  return FullyShardOptions().mesh(rank.mesh({{"replicate", grid.copies}, {"shard", grid.shards}}));
}

/// Runs on every grid, with pairs to compare.
template <typename Model>
void on_grids(
    const std::vector<Grid>& grids, const std::function<Model()>& make,
    const std::function<void(Pair<Model>&, FullyShardOptions)>& fn) {
  for (const auto grid : grids) {
    SCOPED_TRACE(grid.name());
    run_ranks(grid.world(), [&](Rank& rank) {
      Pair<Model> both{rank, make(), make()};
      both.shards = grid.shards;
      fn(both, hybrid_on(rank, grid));
    });
  }
}

inline Stack shallow_stack() {
  return Stack(5, 2);
}

} // namespace shardwise::test
