#pragma once

#include "support/late_network.h"
#include "support/rank.h"

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

namespace shardwise::test {

/// Which process groups carry gathers and sums.
enum class Groups {
  /// One each: the mesh is Rank::mesh(), the network takes the place of its transport there.
  two,
  /// One of the caller's.
  one,
  /// The same without a store, by which ranks could compare what they do.
  one_unchecked,
};

/// A mesh of all ranks over a network; all ranks make it together.
inline Mesh late_mesh(LateNetwork& network, Rank& rank, Groups groups) {
  // A type that no group has yet: a group keeps its first back end of each type.
  const auto put = [&](c10d::ProcessGroup& group, int number) {
    group.setBackend(c10::DeviceType::CPU, c10d::ProcessGroup::BackendType::MPI, network.backend(number, rank.rank()));
  };
  if (groups == Groups::two) {
    auto mesh = rank.mesh();
    put(*mesh.sum_group("world"), 0);
    put(*mesh.gather_group("world"), 1);
    return mesh;
  }
  const auto store = c10::make_intrusive<c10d::PrefixStore>("late", rank.store());
  const auto group = groups == Groups::one
                         ? c10::make_intrusive<c10d::ProcessGroup>(store, rank.rank(), rank.world_size())
                         : c10::make_intrusive<c10d::ProcessGroup>(rank.rank(), rank.world_size());
  put(*group, 0);
  return Mesh::from_process_groups({"world"}, {group}, at::kCPU);
}

} // namespace shardwise::test
