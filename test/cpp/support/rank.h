#pragma once

#include <shardwise/mesh.h>

#include <chrono>
#include <map>
#include <string>
#include <vector>

namespace shardwise::test {

constexpr std::chrono::milliseconds kMeshTimeout = std::chrono::seconds(60);

/// What a test's function gets: one rank, be it a thread or a process.
class Rank {
 public:
  /// `timeout`: of its meshes.
  Rank(int rank, int world_size, c10::intrusive_ptr<c10d::Store> store, std::chrono::milliseconds timeout);

  int rank() const {
    return rank_;
  }
  int world_size() const {
    return world_size_;
  }
  /// "rank 1 of 2"
  std::string name() const;
  /// Where it trains: the CPU, or what SHARDWISE_TEST_DEVICE says.
  at::Device device() const;
  /// Shared by all ranks of the run. The meshes of mesh() use keys that start with "mesh".
  const c10::intrusive_ptr<c10d::Store>& store() const {
    return store_;
  }

  /// A mesh over all ranks: one axis, "world", or the given ones. Made at the first call with these axes, by
  /// all ranks together; open until every rank is done, or until this rank fails.
  Mesh mesh();
  Mesh mesh(const std::vector<Axis>& axes);
  /// Of a mesh that the test makes itself. Meshes of different names do not meet in the store.
  MeshOptions mesh_options(const std::string& name) const;
  /// Shuts down the meshes of mesh(), so that peers that wait for this rank fail at once.
  void close();

  /// Says what this rank does now; shown when the time limit ends the test.
  void step(const std::string& text);

 private:
  int rank_;
  int world_size_;
  c10::intrusive_ptr<c10d::Store> store_;
  std::chrono::milliseconds timeout_;
  std::map<std::string, Mesh> meshes_;
};

} // namespace shardwise::test
