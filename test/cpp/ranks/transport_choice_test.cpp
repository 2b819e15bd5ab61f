// Which transport the process groups of a mesh have.
#include "comm/mesh/mesh_groups.h"
#include "support/ranks.h"
#include "support/variables.h"

#include <gtest/gtest.h>
#include <torch/torch.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

namespace shardwise::test {
namespace {

std::string transport_of(const c10::intrusive_ptr<c10d::ProcessGroup>& group) {
  return group->getBackend(c10::DeviceType::CPU)->getBackendName();
}

void expect_transport(Rank& rank, const std::string& place, const MeshOptions& options, const std::string& name) {
  const Mesh mesh(
      {{"world", 4}}, MeshOptions(options)
                          .store(c10::make_intrusive<c10d::PrefixStore>(place, rank.store()))
                          .rank(rank.rank())
                          .world_size(4)
                          .device(torch::Device(torch::kCPU)));
  for (const auto& group :
       {mesh.group("world"), comm::MeshGroups::gather(mesh, "world"), comm::MeshGroups::sum(mesh, "world"),
        comm::MeshGroups::neighbours(mesh, "world", 2)}) {
    EXPECT_EQ(transport_of(group), name) << rank.name() << " " << place;
    std::vector<at::Tensor> tensors{torch::ones({40000})};
    group->allreduce(tensors)->wait();
    EXPECT_EQ(tensors[0][39999].item<int>(), group->getSize()) << rank.name() << " " << place;
  }
}

TEST(Transport, OfAMesh) {
  const Variables none(Environment{{"SHARDWISE_TRANSPORT", std::nullopt}});
  run_ranks(4, [](Rank& rank) {
    expect_transport(rank, "default", {}, "shardwise");
    expect_transport(rank, "gloo", MeshOptions().transport(Transport::gloo), "gloo");
  });
  const Variables gloo(Environment{{"SHARDWISE_TRANSPORT", "gloo"}});
  run_ranks(4, [](Rank& rank) {
    expect_transport(rank, "variable", {}, "gloo");
    expect_transport(rank, "direct", MeshOptions().transport(Transport::direct), "shardwise");
  });
}

} // namespace
} // namespace shardwise::test
