// What launchers say, by their variables.
#include "comm/rendezvous/launcher.h"
#include "comm/rendezvous/environment.h"
#include "support/variables.h"

#include <shardwise/error.h>
#include <catch2/catch.hpp>

#include <map>

using shardwise::comm::Environment;
using shardwise::comm::find_launcher;
using shardwise::test::Variables;

namespace {

using Values = std::map<std::string, std::string>;

std::optional<shardwise::comm::Launched> launched(const Values& values) {
  return find_launcher([&](const std::string& name) {
    const auto found = values.find(name);
    return found == values.end() ? std::nullopt : std::optional(found->second);
  });
}

const Values kOpenMpi{
    {"OMPI_COMM_WORLD_RANK", "3"},
    {"OMPI_COMM_WORLD_SIZE", "4"},
    {"OMPI_COMM_WORLD_LOCAL_RANK", "1"},
    {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"},
    {"PMIX_NAMESPACE", "750780417"}};
const Values kHydra{{"PMI_RANK", "3"}, {"PMI_SIZE", "4"}, {"MPI_LOCALRANKID", "1"}, {"MPI_LOCALNRANKS", "2"}};
const Values kSlurm{
    {"SLURM_PROCID", "3"},
    {"SLURM_STEP_NUM_TASKS", "4"},
    {"SLURM_LOCALID", "1"},
    {"SLURM_STEP_NUM_NODES", "2"},
    {"SLURM_STEP_NODELIST", "node[03-04],x"},
    {"SLURM_JOB_ID", "77"}};

Values with(Values values, const Values& more) {
  for (const auto& [name, value] : more) values[name] = value;
  return values;
}

/// The whole environment is this, as far as shardwise reads it.
Environment read(const Values& values) {
  auto changes = shardwise::test::of_no_rank();
  for (const auto* launcher : {&kOpenMpi, &kHydra, &kSlurm}) {
    for (const auto& [name, value] : *launcher) changes.emplace_back(name, std::nullopt);
  }
  for (const auto& [name, value] : values) changes.emplace_back(name, value);
  const Variables changed(changes);
  return Environment::read();
}

} // namespace

TEST_CASE("launchers: each says its rank") {
  CHECK_FALSE(launched({}));
  CHECK_FALSE(launched({{"OMPI_COMM_WORLD_RANK", "1"}}));
  // A batch script has these without srun: it is one process, not a rank.
  CHECK_FALSE(launched({{"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "4"}, {"SLURM_LOCALID", "0"}}));
  for (const auto& values : {kOpenMpi, kHydra, kSlurm}) {
    const auto told = launched(values);
    REQUIRE(told);
    CHECK(told->rank == 3);
    CHECK(told->world_size == 4);
    CHECK(told->local_rank == 1);
  }
  CHECK(launched(kOpenMpi)->job == "750780417");
  CHECK(launched(kOpenMpi)->first_host.empty());
  CHECK(launched(kSlurm)->first_host == "node03");
}

TEST_CASE("launchers: one that another one started counts") {
  // Slurm starts a helper of mpirun on each of two hosts.
  const Values helper{{"SLURM_PROCID", "1"}, {"SLURM_STEP_NUM_TASKS", "2"}, {"SLURM_LOCALID", "0"}};
  CHECK(launched(with(helper, kOpenMpi))->rank == 3);
  CHECK(launched(with(helper, kHydra))->rank == 3);
  CHECK(launched(with(helper, kHydra))->local_rank == 1);
  // srun --mpi=pmi2 sets both; Slurm says more.
  const auto both = launched(with(kSlurm, {{"PMI_RANK", "3"}, {"PMI_SIZE", "4"}}));
  CHECK(both->launcher == "srun");
  CHECK(both->local_rank == 1);
}

TEST_CASE("launchers: the host of rank 0") {
  using shardwise::comm::first_host_of;
  CHECK(first_host_of("node7") == "node7");
  CHECK(first_host_of("node7,node8") == "node7");
  CHECK(first_host_of("node[03-05,7],other") == "node03");
  CHECK(first_host_of("node[7,9]") == "node7");
  CHECK(first_host_of("rack[2-3]n[10-11]") == "rack2n10");
  CHECK(first_host_of("a[1-2]-ib,b") == "a1-ib");
  CHECK(first_host_of("node[03-05") == "");
  CHECK(first_host_of("") == "");
}

TEST_CASE("launchers: where the ranks meet") {
  auto env = read(with(kOpenMpi, {{"OMPI_COMM_WORLD_LOCAL_SIZE", "4"}}));
  CHECK(env.rank == 3);
  CHECK(env.world_size == 4);
  CHECK(env.local_rank == 1);
  CHECK(env.master_address == "127.0.0.1");
  CHECK(env.master_port == shardwise::comm::port_of("750780417"));
  env = read(kSlurm);
  CHECK(env.master_address == "node03");
  CHECK(env.master_port == shardwise::comm::port_of("77"));
  env = read(with(kHydra, {{"MPI_LOCALNRANKS", "4"}}));
  CHECK(env.master_address == "127.0.0.1");
  CHECK(env.master_port == 29500);
  env = read(with(kOpenMpi, {{"MASTER_ADDR", "head"}, {"MASTER_PORT", "4000"}}));
  CHECK(env.master_address == "head");
  CHECK(env.master_port == 4000);
  // torchrun under srun or mpirun.
  env = read(with(kSlurm, {{"RANK", "0"}, {"WORLD_SIZE", "2"}, {"MASTER_ADDR", "h"}, {"MASTER_PORT", "1"}}));
  CHECK(env.rank == 0);
  CHECK(env.world_size == 2);
  // A world of one needs nobody.
  env = read(with(kOpenMpi, {{"OMPI_COMM_WORLD_RANK", "0"}, {"OMPI_COMM_WORLD_SIZE", "1"}}));
  CHECK(env.world_size == 1);
  CHECK(env.master_address.empty());
}

TEST_CASE("launchers: ports") {
  using shardwise::comm::port_of;
  CHECK(port_of("77") == port_of("77"));
  CHECK(port_of("77") != port_of("78"));
  for (int job = 0; job < 1000; ++job) {
    const auto port = port_of(std::to_string(job));
    CHECK((port >= 20000 && port < 30000));
  }
}

TEST_CASE("launchers: what is wrong is named") {
  CHECK_THROWS_WITH(
      read(kOpenMpi), Catch::Contains("mpirun of Open MPI started this process as rank 3 of 4 on several hosts") &&
                          Catch::Contains("Set MASTER_ADDR") && Catch::Contains("OMPI_COMM_WORLD_LOCAL_SIZE=2"));
  CHECK_THROWS_WITH(
      launched(with(kSlurm, {{"SLURM_PROCID", "4"}})), Catch::Contains("SLURM_PROCID is 4, but SLURM_STEP_NUM_TASKS"));
  CHECK_THROWS_WITH(launched(with(kHydra, {{"PMI_SIZE", "x"}})), Catch::Contains("PMI_SIZE is 'x'; it must be"));
  CHECK_THROWS_AS(read(kOpenMpi), shardwise::ValueError);
}
