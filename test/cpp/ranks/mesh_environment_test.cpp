// Meshes from the environment: torchrun's variables, plain ones, none, and bad ones.
#include "support/expect.h"
#include "support/port.h"
#include "support/processes.h"

#include <shardwise/error.h>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cstdlib>
#include <filesystem>
#include <random>
#include <thread>

namespace shardwise::test {
namespace {

using Clock = std::chrono::steady_clock;

MeshOptions on_cpu() {
  return MeshOptions().device(at::kCPU).connect_timeout(std::chrono::seconds(60)).timeout(std::chrono::seconds(60));
}

/// 1 + 2 + ... over the ranks of an axis, by an all-reduce.
int64_t sum_over(const Mesh& mesh, const std::string& axis) {
  std::vector<at::Tensor> tensors{torch::full({1}, mesh.rank() + 1)};
  mesh.group(axis)->allreduce(tensors)->wait();
  return tensors[0].item<int64_t>();
}

/// Rank 1 of 2 with a master that is not there, and these changes.
Environment second_of_two(const Environment& changes = {}) {
  auto result =
      of_no_rank({{"RANK", "1"}, {"WORLD_SIZE", "2"}, {"MASTER_ADDR", "127.0.0.1"}, {"MASTER_PORT", "29500"}});
  result.insert(result.end(), changes.begin(), changes.end());
  return result;
}

/// What a rank of two hears that comes to no mesh, soon after its time is over or before.
void expect_no_mesh(const Environment& changes, std::chrono::seconds timeout, const std::vector<std::string>& parts) {
  const Variables changed(second_of_two(changes));
  const auto start = Clock::now();
  expect_error<PeerError>([&] { Mesh::from_env(on_cpu().connect_timeout(timeout)); }, parts);
  EXPECT_LE(Clock::now() - start, std::chrono::seconds(21));
}

TEST(MeshEnvironment, TheDeviceIsTheGpuWhereThereIsOne) {
  const Variables changed(of_no_rank());
  const auto mesh = Mesh::from_env();
  EXPECT_EQ(mesh.device(), torch::cuda::is_available() ? at::Device(at::kCUDA, 0) : at::Device(at::kCPU));
}

TEST(MeshEnvironment, OneAfterTheOtherAndAway) {
  // Rank 0 serves the store. Whatever the ranks' pace, it must not take it away from one that is still connecting.
  run_processes(3, [](Rank& rank) {
    std::minstd_rand random(rank.rank() + 1);
    for (int i = 0; i < 15; ++i) {
      rank.step(c10::str("mesh ", i));
      const auto mesh = Mesh::from_env(on_cpu());
      if (i % 2 == 0) {
        EXPECT_EQ(sum_over(mesh, "world"), 6);
      }
      // The slowest rank still has this mesh when the fastest asks for the next.
      std::this_thread::sleep_for(std::chrono::milliseconds(random() % 50));
    }
  });
}

/// This test again, by a launcher of ranks.
Ended launch(std::vector<std::string> launcher, const Environment& changes = {}) {
  auto command = this_test(of_no_rank(changes));
  command.arguments.insert(command.arguments.begin(), launcher.begin(), launcher.end());
  auto ended = run_limited({command}).front();
  EXPECT_TRUE(ended.ok()) << ended.how() << ":\n" << ended.output;
  return ended;
}

/// On three ranks, by a launcher in the folder of Python's programs that sets `rank` for each.
void run_under(const std::string& launcher, const std::vector<std::string>& arguments, const char* rank) {
  if (std::getenv(rank) != nullptr) {
    const auto mesh = Mesh::from_env(on_cpu());
    EXPECT_EQ(mesh.describe(), c10::str("Mesh(world=3; rank ", std::getenv(rank), " on cpu, shared memory)"));
    EXPECT_EQ(sum_over(mesh, "world"), 6);
    return;
  }
  const auto program = python().parent_path() / launcher;
  if (!std::filesystem::exists(program)) GTEST_SKIP() << "there is no " << program;
  std::vector<std::string> words{program};
  words.insert(words.end(), arguments.begin(), arguments.end());
  words.insert(words.end(), {"-n", "3"});
  launch(words);
}

TEST(MeshEnvironment, MpirunOfOpenMpi) {
  run_under("prterun", {"--personality", "ompi", "--allow-run-as-root", "--oversubscribe"}, "OMPI_COMM_WORLD_RANK");
}

TEST(MeshEnvironment, MpirunOfMpich) {
  run_under("mpiexec.hydra", {}, "PMI_RANK");
}

/// On two ranks.
Ended torchrun(int restarts, const Environment& changes = {}) {
  return launch(
      {python(), "-m", "torch.distributed.run", "--no-python", "--nproc-per-node=2", "--rdzv-backend=c10d",
       "--rdzv-endpoint=127.0.0.1:0", c10::str("--max-restarts=", restarts)},
      changes);
}

TEST(MeshEnvironment, TorchrunWithItsAgentStoreAndRestarts) {
  if (const char* restarts = std::getenv("TORCHELASTIC_RESTART_COUNT")) {
    EXPECT_STREQ(std::getenv("TORCHELASTIC_USE_AGENT_STORE"), "True");
    const std::string life = restarts;
    const std::string rank = std::getenv("RANK");
    // In the first life one rank comes as far as the store, the other does not.
    if (life == "0" && rank == "1") throw std::runtime_error("fails before it has a mesh");
    const auto mesh = Mesh::from_env(on_cpu());
    EXPECT_EQ(mesh.size(), 2);
    EXPECT_EQ(sum_over(mesh, "world"), 3);
    std::cout << c10::str("rank ", rank, " summed in life ", life, "\n") << std::flush;
    if (life == "1" && rank == "1") throw std::runtime_error("fails with a mesh");
    EXPECT_EQ(sum_over(mesh, "world"), 3);
    return;
  }
  const auto output = torchrun(/*restarts=*/2).output;
  expect_text(
      output, {"fails before it has a mesh", "rank 0 summed in life 1", "rank 1 summed in life 1", "fails with a mesh",
               "rank 0 summed in life 2", "rank 1 summed in life 2"});
  EXPECT_EQ(output.find("failed to bind"), std::string::npos) << "a rank served the agent's store:\n" << output;
}

TEST(MeshEnvironment, TorchrunWithoutItsAgentStore) {
  if (const char* has_store = std::getenv("TORCHELASTIC_USE_AGENT_STORE")) {
    EXPECT_STREQ(has_store, "False");
    const Mesh mesh({{"replicate", 1}, {"shard", 2}}, on_cpu());
    EXPECT_EQ(mesh.rank(), std::stoi(std::getenv("RANK")));
    EXPECT_EQ(sum_over(mesh, "shard"), 3);
    return;
  }
  torchrun(/*restarts=*/0, {{"TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1"}});
}

TEST(MeshEnvironment, AxesMustFitTheWorldSize) {
  const Variables changed(second_of_two());
  expect_error<ValueError>(
      [] {
        Mesh({{"replicate", 2}, {"shard", 3}}, on_cpu());
      },
      {"replicate=2, shard=3", "multiply to 6", "the world has 2 ranks", "(WORLD_SIZE)", "rank 1 on cpu"});
}

TEST(MeshEnvironment, AMasterWhereNobodyListensOrAnswers) {
  const Port port;
  for (const bool listens : {false, true}) {
    if (listens) port.listen();
    expect_no_mesh(
        {{"MASTER_PORT", std::to_string(port.number())}}, std::chrono::seconds(1),
        {"rank 1 of 2 could not reach the store", c10::str("MASTER_ADDR:MASTER_PORT = 127.0.0.1:", port.number()),
         "within 1000 ms", "connect_timeout()"});
  }
}

TEST(MeshEnvironment, PeersThatDoNotCome) {
  const Port port;
  expect_no_mesh(
      {{"RANK", "0"}, {"MASTER_PORT", std::to_string(port.number())}}, std::chrono::seconds(1),
      {"rank 0 of 2: rank 1 did not join the process group 'Mesh(world=2; rank 0 on cpu)' within 1000 ms"});
}

TEST(MeshEnvironment, APortThatIsTaken) {
  const Port listener;
  listener.listen();
  const auto port = listener.number();
  // Not after the whole time of a minute.
  expect_no_mesh(
      {{"RANK", "0"}, {"MASTER_PORT", std::to_string(port)}}, std::chrono::seconds(60),
      {"rank 0 of 2", c10::str("127.0.0.1:", port, ", because the port is taken"), "its own MASTER_PORT",
       "from 1024 to 32767", "torchrun --standalone"});
}

TEST(MeshEnvironment, ASecondOneIsRefused) {
  const Variables changed(of_no_rank());
  auto first = Mesh::from_env(on_cpu());
  EXPECT_EQ(first.describe(), "Mesh(world=1; rank 0 on cpu)");
  const auto copy = first;
  const std::vector<std::string> parts{
      "already has a mesh made from the environment", "Copy that Mesh", "shut it down"};
  expect_error<ValueError>([] { Mesh::from_env(on_cpu()); }, parts);
  expect_error<ValueError>([] { Mesh({{"shard", 1}}, on_cpu()); }, parts);
  EXPECT_EQ(sum_over(copy, "world"), 1) << "the first must stay as it was";
  first.shutdown();
  EXPECT_EQ(sum_over(Mesh::from_env(on_cpu()), "world"), 1);
  // The one before went out of scope.
  EXPECT_EQ(sum_over(Mesh::from_env(on_cpu()), "world"), 1);
}

TEST(MeshEnvironment, TheOpenOneIsShared) {
  const Variables changed(of_no_rank());
  {
    const auto first = Mesh::current(on_cpu());
    EXPECT_EQ(Mesh::current(on_cpu()).group("world"), first.group("world"));
  }
  Mesh second({{"replicate", 1}}, on_cpu());
  EXPECT_EQ(Mesh::current(on_cpu()).group("replicate"), second.group("replicate"));
  second.shutdown();
  EXPECT_EQ(sum_over(Mesh::current(on_cpu()), "world"), 1);
}

TEST(MeshEnvironment, AFailedOneMayBeTriedAgain) {
  // Rank 1 tries before rank 0 serves the store, and both agree on the mesh all the same.
  run_processes(2, [](Rank& rank) {
    if (rank.rank() == 1) {
      expect_error<PeerError>(
          [] { Mesh::from_env(on_cpu().connect_timeout(std::chrono::milliseconds(200))); }, {"could not reach"});
      rank.store()->set("tried", std::string("yes"));
    } else {
      rank.store()->wait({"tried"});
    }
    EXPECT_EQ(sum_over(Mesh::from_env(on_cpu()), "world"), 3);
  });
}

TEST(MeshEnvironment, TheNetworkInterfaceIsNamed) {
  const Variables changed(of_no_rank({{"GLOO_SOCKET_IFNAME", "no-such-interface"}}));
  expect_error<ValueError>(
      [] { Mesh::from_env(on_cpu()); }, {"GLOO_SOCKET_IFNAME", "'no-such-interface'", "`ip address`"});
}

} // namespace
} // namespace shardwise::test
