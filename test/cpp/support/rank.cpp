#include "support/rank.h"

#include "support/processes.h"
#include "support/test_device.h"
#include "support/time_limit.h"

#include <ATen/CPUGeneratorImpl.h>
#include <c10/util/StringUtil.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

namespace shardwise::test {

Rank::Rank(int rank, int world_size, c10::intrusive_ptr<c10d::Store> store, const RankOptions& options)
    : rank_(rank),
      world_size_(world_size),
      store_(std::move(store)),
      options_(options),
      generator_(at::detail::createCPUGenerator(options.seed + static_cast<uint64_t>(rank))) {}

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
  const auto options = MeshOptions()
                           .device(device())
                           .connect_timeout(options_.connect_timeout)
                           .timeout(options_.timeout)
                           .store(c10::make_intrusive<c10d::PrefixStore>(key, store_))
                           .rank(rank_)
                           .world_size(world_size_);
  return meshes_.emplace(key, Mesh(axes, options)).first->second;
}

void Rank::close() {
  for (auto& [key, mesh] : meshes_) mesh.shutdown();
}

void Rank::step(const std::string& text) {
  WatchedThread::step(text);
}

} // namespace shardwise::test
