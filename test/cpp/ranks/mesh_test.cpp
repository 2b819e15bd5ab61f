// Meshes over a given store, and from given process groups: coordinates, groups, and what is refused.
#include "support/expect.h"
#include "support/ranks.h"

#include <shardwise/error.h>

#include <gtest/gtest.h>
#include <torch/torch.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

namespace shardwise::test {
namespace {

using Groups = std::vector<c10::intrusive_ptr<c10d::ProcessGroup>>;

/// The numbers that the ranks of a group give, in the order of the group.
std::vector<int64_t> gathered(const c10::intrusive_ptr<c10d::ProcessGroup>& group, int64_t number) {
  std::vector<at::Tensor> input{torch::full({1}, number)};
  std::vector<std::vector<at::Tensor>> outputs{{}};
  for (int k = 0; k < group->getSize(); ++k) outputs[0].push_back(torch::full({1}, -1));
  group->allgather(outputs, input)->wait();
  std::vector<int64_t> result;
  for (const auto& output : outputs[0]) result.push_back(output.item<int64_t>());
  return result;
}

/// Options for a world whose other ranks never come.
MeshOptions alone(int rank, int world_size) {
  return MeshOptions()
      .device(at::kCPU)
      .store(c10::make_intrusive<c10d::HashStore>())
      .rank(rank)
      .world_size(world_size)
      .connect_timeout(std::chrono::seconds(1));
}

TEST(Mesh, CoordinatesAreRowMajor) {
  run_ranks(8, [](Rank& rank) {
    const auto mesh = rank.mesh({{"replicate", 2}, {"shard", 4}});
    const int64_t k = rank.rank();
    EXPECT_EQ(mesh.rank(), k);
    EXPECT_EQ(mesh.size(), 8);
    EXPECT_EQ(mesh.ndim(), 2);
    EXPECT_EQ(mesh.axes(), (std::vector<Axis>{{"replicate", 2}, {"shard", 4}}));
    EXPECT_EQ(mesh.size("replicate"), 2);
    EXPECT_EQ(mesh.size("shard"), 4);
    EXPECT_EQ(mesh.coordinate("replicate"), k / 4);
    EXPECT_EQ(mesh.coordinate("shard"), k % 4);
    EXPECT_EQ(mesh.device(), at::Device(at::kCPU));
    EXPECT_EQ(mesh.describe(), c10::str("Mesh(replicate=2, shard=4; rank ", k, " on cpu, shared memory)"));

    // DeviceMesh.from arange(8).view(2, 4): the rows are the shard groups, the columns the replicate groups.
    const auto row = k / 4 * 4;
    EXPECT_EQ(gathered(mesh.group("shard"), k), (std::vector<int64_t>{row, row + 1, row + 2, row + 3}));
    EXPECT_EQ(gathered(mesh.group("replicate"), k), (std::vector<int64_t>{k % 4, k % 4 + 4}));
  });
}

TEST(Mesh, SeveralOverOneStore) {
  run_ranks(3, [](Rank& rank) {
    const auto options = rank.mesh_options("several");
    const Mesh first({{"world", 3}}, options);
    const Mesh second({{"world", 3}}, options);
    const auto number = int64_t{rank.rank()};
    EXPECT_EQ(gathered(first.group("world"), number), (std::vector<int64_t>{0, 1, 2}));
    EXPECT_EQ(gathered(second.group("world"), 10 * number), (std::vector<int64_t>{0, 10, 20}));
  });
}

TEST(Mesh, TakesGivenProcessGroups) {
  run_ranks(4, [](Rank& rank) {
    const auto made = rank.mesh({{"a", 2}, {"b", 2}});
    const Groups groups{made.group("a"), made.group("b")};
    auto mesh = Mesh::from_process_groups({"replicate", "shard"}, groups, rank.device());
    EXPECT_EQ(mesh.axes(), (std::vector<Axis>{{"replicate", 2}, {"shard", 2}}));
    EXPECT_EQ(mesh.rank(), rank.rank());
    EXPECT_EQ(mesh.coordinate("replicate"), rank.rank() / 2);
    EXPECT_EQ(mesh.coordinate("shard"), rank.rank() % 2);
    EXPECT_EQ(mesh.group("shard"), groups[1]);
    mesh.shutdown();
    expect_error<Error>([&] { mesh.group("shard"); }, {"Mesh(replicate=2, shard=2", "was shut down"});
    const auto row = int64_t{rank.rank() / 2 * 2};
    EXPECT_EQ(gathered(groups[1], rank.rank()), (std::vector<int64_t>{row, row + 1})) << "closed the caller's group";
  });
}

TEST(Mesh, RefusesBadProcessGroups) {
  run_ranks(1, [](Rank& rank) {
    const auto group = rank.mesh().group("world");
    const auto make = [](const std::vector<std::string>& names, const Groups& groups) {
      return [=] { Mesh::from_process_groups(names, groups, at::kCPU); };
    };
    expect_error<ValueError>(make({"a"}, {group, group}), {"1 names for 2 process groups"});
    expect_error<ValueError>(make({"a", "b"}, {group, {}}), {"axis 'b' is null"});
    expect_error<ValueError>(make({"a", "a"}, {group, group}), {"two axes", "'a'"});
    expect_error<ValueError>(make({""}, {group}), {"empty name"});
    expect_error<ValueError>(make({}, {}), {"at least one axis"});
  });
}

TEST(Mesh, RefusesUnknownAxes) {
  run_ranks(1, [](Rank& rank) {
    const auto mesh = rank.mesh({{"shard", 1}});
    const std::vector<std::string> parts{"no axis 'tensor'", "Mesh(shard=1; rank 0 on cpu)"};
    expect_error<ValueError>([&] { mesh.size("tensor"); }, parts);
    expect_error<ValueError>([&] { mesh.coordinate("tensor"); }, parts);
    expect_error<ValueError>([&] { mesh.group("tensor"); }, parts);
  });
}

TEST(Mesh, RefusesBadAxes) {
  const auto make = [](const std::vector<Axis>& axes) { return [=] { Mesh(axes, alone(3, 4)); }; };
  expect_error<ValueError>(make({}), {"at least one axis"});
  expect_error<ValueError>(make({{"", 4}}), {"empty name"});
  expect_error<ValueError>(make({{"shard", 0}, {"replicate", 4}}), {"axis 'shard' has size 0", "1 or more"});
  expect_error<ValueError>(make({{"shard", -2}, {"replicate", -2}}), {"axis 'shard' has size -2"});
  expect_error<ValueError>(make({{"shard", 2}, {"shard", 2}}), {"two axes", "'shard'"});
  expect_error<ValueError>(make({{"a", int64_t{1} << 32}, {"b", int64_t{1} << 32}}), {"too large", "'b'"});
  for (const auto& axes : {std::vector<Axis>{{"shard", 3}}, {{"replicate", 2}, {"shard", 4}}, {{"a", 1}}}) {
    int64_t product = 1;
    for (const auto& axis : axes) product *= axis.size;
    expect_error<ValueError>(
        make(axes), {c10::str("multiply to ", product), "the world has 4 ranks", "MeshOptions().world_size()",
                     c10::str(axes.back().name, "=", axes.back().size), "rank 3"});
  }
}

TEST(Mesh, RefusesAnIncompletePlace) {
  const auto options = [](int rank, int world_size) { return alone(0, 1).rank(rank).world_size(world_size); };
  const auto both = [](const MeshOptions& given, const std::vector<std::string>& parts) {
    expect_error<ValueError>([&] { Mesh({{"world", 2}}, given); }, parts);
    expect_error<ValueError>([&] { Mesh::from_env(given); }, parts);
  };
  both(options(-1, -1), {"has a store, rank -1 and world_size -1"});
  both(options(-1, 2), {"rank -1 and world_size 2"});
  both(options(0, -1), {"rank 0 and world_size -1"});
  both(options(2, 2), {"rank 2 and world_size 2", "from 0 to world_size - 1"});
  both(MeshOptions().rank(0).world_size(2), {"rank 0 and world_size 2, but no store"});
}

} // namespace
} // namespace shardwise::test
