#include "support/rank.h"

#include "support/processes.h"
#include "support/test_device.h"
#include "support/time_limit.h"

#include <c10/util/StringUtil.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

namespace shardwise::test {

Rank::Rank(int rank, int world_size, c10::intrusive_ptr<c10d::Store> store, std::chrono::milliseconds timeout)
    : rank_(rank),
      world_size_(world_size),
      store_(std::move(store)),
      timeout_(timeout) {}

std::string Rank::name() const {
  return c10::str("rank ", rank_, " of ", world_size_);
}

at::Device Rank::device() const {
  return is_rank_process() ? at::kCPU : device_of_rank(rank_);
}

Mesh Rank::mesh() {
  return mesh({{"world", world_size_}});
}

Mesh Rank::mesh(const std::vector<Axis>& axes) {
  std::string key = "mesh";
  for (const auto& axis : axes) key += c10::str("/", axis.name, "=", axis.size);
  const auto found = meshes_.find(key);
  if (found != meshes_.end()) return found->second;
  return meshes_.emplace(key, Mesh(axes, mesh_options(key))).first->second;
}

MeshOptions Rank::mesh_options(const std::string& name) const {
  return MeshOptions()
      .device(device())
      .connect_timeout(kMeshTimeout)
      .timeout(timeout_)
      .store(c10::make_intrusive<c10d::PrefixStore>(name, store_))
      .rank(rank_)
      .world_size(world_size_);
}

void Rank::close() {
  for (auto& [key, mesh] : meshes_) mesh.shutdown();
}

void Rank::step(const std::string& text) {
  WatchedThread::step(text);
}

} // namespace shardwise::test
