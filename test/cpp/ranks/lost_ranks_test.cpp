// Ranks that die, or come again over an old store: the others say so soon, and name the one that died.
#include "comm/mesh/axis_group.h"
#include "ranks/hybrid_models.h"

#include "comm/collectives/collectives.h"
#include "comm/mesh/process_group.h"
#include "comm/rendezvous/rendezvous.h"
#include "comm/rendezvous/second_group.h"
#include "support/processes.h"
#include "transport_groups.h"

#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <thread>

namespace shardwise::test {
namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;

void wrap_and_step(Rank& rank, const Mesh& mesh) {
  stacks(rank, FullyShardOptions().mesh(mesh), 5, 1).train(stack_loss, 3);
}

/// Returns when all ranks have called it as often with this name.
void come(c10d::Store& store, const std::string& name, int count) {
  store.add(name, 1);
  while (store.add(name, 0) < count) std::this_thread::sleep_for(1ms);
}

/// All ranks begin `live` together, and it never ends by itself. What it gets kills the last rank after some time; the
/// others must name that one within seconds.
using Kill = std::function<void(std::chrono::milliseconds)>;
void expect_named(int world, const Environment& environment, const std::function<void(Rank&, const Kill&)>& live) {
  ProcessOptions options;
  options.may_fail = {world - 1};
  options.environment = environment;
  const auto ended = run_processes(
      world,
      [&](Rank& rank) {
        // One of its own: a thread that is left behind may hold the other.
        const auto store = rank.store()->clone();
        come(*store, "begun", world);
        Clock::time_point begin = Clock::now();
        const auto kill = [&](std::chrono::milliseconds time) {
          begin = Clock::now();
          if (rank.rank() == world - 1) raise_later(time, SIGKILL);
        };
        expect_error<PeerError>(
            [&] { live(rank, kill); }, {c10::str("rank ", rank.rank()), c10::str("rank ", world - 1)});
        // Far from the limit of a minute that the meshes have.
        EXPECT_LT(Clock::now() - begin, 30s) << rank.name();
        // Who ends closes its connections, and that tells others too.
        come(*store, "told", world - 1);
      },
      options);
  EXPECT_EQ(ended.back().signal, SIGKILL);
}

void wrap_for_ever(const FullyShardOptions& options) {
  for (;;) {
    Stack ours(5, 1);
    shard_stack(ours, options);
  }
}

/// A rank that uses it comes no further.
class EndlessStore : public c10d::PrefixStore {
 public:
  using PrefixStore::PrefixStore;
  bool check(const std::vector<std::string>& /*keys*/) override {
    std::this_thread::sleep_for(60s);
    return false;
  }
};

/// A mesh on a process group of Gloo's, as a caller has it. All ranks have made all their connections: while Gloo makes
/// them it waits for one that died to the end of its time.
Mesh given_mesh(Rank& rank) {
  const auto spec = spec_of(rank, "given");
  const auto group = comm::make_process_group(spec);
  comm::store_barrier(spec);
  return Mesh::from_process_groups({"world"}, {group}, at::kCPU);
}

} // namespace

TEST(LostRanks, AStoreThatOutlivesItsRanks) {
  // T45: torchrun's agent keeps its store when it starts ranks again. Each life leaves the keys of its own behind.
  const auto store = c10::make_intrusive<c10d::HashStore>();
  const auto in_store = [&](const std::string& name, std::chrono::milliseconds time, Rank& rank) {
    return rank.mesh_options(name).device(at::kCPU).connect_timeout(time).store(
        c10::make_intrusive<c10d::PrefixStore>(name, store));
  };
  for (int life = 0; life < 3; ++life) {
    run_ranks(2, [&](Rank& rank) {
      // One rank is killed before it has a mesh, so that ranks were here a different number of times.
      if (rank.rank() == life % 2) {
        expect_error<PeerError>(
            [&] { Mesh::from_env(in_store("mesh", 50ms, rank)); },
            {rank.name(), rank.rank() == 0 ? "rank 1 did not join" : "rank 0 did not form", "within 50 ms"});
      }
      come(*rank.store(), "killed", 2);
      // The first rank comes late: what the other finds meanwhile is old.
      if (rank.rank() == 0) std::this_thread::sleep_for(50ms);
      wrap_and_step(rank, Mesh::from_env(in_store("mesh", 60s, rank)));
      come(*rank.store(), "trained", 2);
    });
  }
}

TEST(LostRanks, ADeathBeforeTheFirstWrap) {
  // T46
  expect_named(3, {}, [](Rank& rank, const Kill& kill) {
    const auto mesh = given_mesh(rank);
    kill(0ms);
    if (rank.rank() == 2) std::this_thread::sleep_for(60s);
    wrap_for_ever(FullyShardOptions().mesh(mesh));
  });
}

// Rank 1 fails where ranks 1 and 3 make groups, and does not come to those that rank 0 waits for.
TEST(LostRanks, AFailureAlongAnotherAxisBeforeTheFirstWrap) {
  expect_named(4, {}, [](Rank& rank, const Kill& kill) {
    const auto options = hybrid_on(rank, {2, 2});
    kill(0ms);
    if (rank.rank() == 3) std::this_thread::sleep_for(60s);
    wrap_for_ever(options);
  });
}

TEST(LostRanks, AFailureAlongAnotherAxisWhileAUnitMakesItsGroups) {
  expect_named(4, {}, [](Rank& rank, const Kill& kill) {
    const auto mesh = rank.mesh({{"replicate", 2}, {"shard", 2}});
    const auto agreement = comm::Agreement::of(comm::axis_groups_of(mesh));
    kill(0ms);
    if (rank.rank() == 3) std::this_thread::sleep_for(60s);
    comm::MeshGroups::sum(mesh, "replicate");
    comm::MeshGroups::sum(mesh, "shard");
  });
}

// Between the rendezvous, after which all know each other's processes, and the connections, which it never makes.
TEST(LostRanks, ADeathWhileAGroupIsMade) {
  expect_named(3, {}, [](Rank& rank, const Kill& kill) {
    if (rank.rank() < 2) comm::make_transport(spec_of(rank, "a group"));
    // The last to be told who came.
    comm::rendezvous(spec_of(rank, "a group"), comm::Processes::identity(2));
    kill(0ms);
    std::this_thread::sleep_for(60s);
  });
}

// After all have come to make a group, and before the rendezvous, where nobody has a connection to anybody.
TEST(LostRanks, ADeathBetweenComingAndTheRoll) {
  expect_named(3, {}, [](Rank& rank, const Kill& kill) {
    const auto first = spec_of(rank, "first");
    const auto group = comm::make_process_group(first);
    comm::store_barrier(first);
    kill(1s);
    auto second = spec_of(rank, "second");
    if (rank.rank() == 2) second.store = c10::make_intrusive<EndlessStore>("second", second.store);
    comm::make_second_group(*group, {}, second);
  });
}

TEST(LostRanks, TheOneThatDiedIsNamedOverTcp) {
  const Environment over_tcp{{"SHARDWISE_SHARED_MEMORY", "off"}};
  expect_named(4, over_tcp, [](Rank& rank, const Kill& kill) {
    const comm::Collectives world(comm::axis_groups_of(rank.mesh()).front());
    Counters counters;
    kill(100ms);
    for (;;) world.all_reduce(torch::ones({40000}), "the sum", counters).wait();
  });
}

TEST(LostRanks, ADeathAlongAnotherAxis) {
  // Rank 0 has no connection to rank 3, and waits for those that lost theirs.
  expect_named(4, {}, [](Rank& rank, const Kill& kill) {
    auto model = shallow_stack();
    shard_stack(model, hybrid_on(rank, {2, 2}));
    for (int step = 0; step < 3; ++step) stack_loss(model, step, rank.rank()).backward();
    kill(100ms);
    for (int step = 0;; ++step) stack_loss(model, step % 3, rank.rank()).backward();
  });
}

} // namespace shardwise::test
