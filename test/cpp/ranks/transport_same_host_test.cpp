// Ranks that read each other's memory: when they do, what they do where a rank is killed or stopped, and that nothing
// is left of it.
#include "comm/mesh/axis_group.h"
#include "support/expect.h"
#include "support/processes.h"
#include "support/ranks.h"
#include "transport/same_host/arena.h"
#include "transport/same_host/host_group.h"
#include "transport_groups.h"

#include <shardwise/shared_memory.h>
#include <sys/wait.h>
#include <unistd.h>
#include <atomic>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <thread>

namespace shardwise::test {
namespace {

using namespace std::chrono_literals;
using transport::same_host::Arena;

/// Files that this process has open, and pieces of shared memory that it has mapped.
struct Held {
  int64_t files = 0;
  int64_t mapped = 0;

  static Held now() {
    Held held;
    for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) held.files += entry.exists() ? 1 : 0;
    std::ifstream maps("/proc/self/maps");
    for (std::string line; std::getline(maps, line);) {
      if (line.find("memfd:shardwise") != std::string::npos) ++held.mapped;
    }
    return held;
  }
};

void expect_way(Rank& rank, const comm::GroupSpec& spec, const std::string& way) {
  const auto backend = comm::make_direct(spec);
  EXPECT_EQ(transport_name(*backend), way) << rank.name() << " " << spec.name;
  expect_sum(rank, *backend, torch::empty({40000}));
}

TEST(SameHost, AllRanksAgreeOnTheWay) {
  run_ranks(3, [](Rank& rank) {
    expect_way(rank, spec_of(rank, "one host"), "shared memory");
    auto unwanted = spec_of(rank, "unwanted");
    unwanted.shared_memory = rank.rank() != 1;
    expect_way(rank, unwanted, "TCP");
    auto two_hosts = spec_of(rank, "two hosts");
    if (rank.rank() == 1) two_hosts.host = "another";
    expect_way(rank, two_hosts, "TCP");
    auto named = spec_of(rank, "named");
    named.host = "another";
    expect_way(rank, named, "shared memory");
  });
}

TEST(SameHost, TheOptionOfAMeshComesBeforeTheEnvironment) {
  for (const bool wanted : {false, true}) {
    const Variables variables(Environment{{"SHARDWISE_SHARED_MEMORY", wanted ? "off" : "on"}});
    run_ranks(2, [&](Rank& rank) {
      const Mesh mesh({{"world", 2}}, rank.mesh_options("mesh").device(at::kCPU).shared_memory(wanted));
      EXPECT_NE(mesh.describe().find(wanted ? "shared memory)" : "TCP)"), std::string::npos) << mesh.describe();
      EXPECT_EQ(
          transport_name(*comm::MeshGroups::neighbours(mesh, "world", 2)->getBackend(at::kCPU)),
          wanted ? "shared memory" : "TCP");
    });
  }
}

// Whose tensors are where has no say in the result, nor in what the others do.
TEST(SameHost, SomeTensorsInPlaceAndSomeNot) {
  run_processes(3, [](Rank& rank) {
    const auto backend = comm::make_direct(spec_of(rank, "mixed"));
    for (int in_place = 0; in_place < 8; ++in_place) {
      const bool mine = ((in_place >> rank.rank()) & 1) != 0;
      const auto place = [&](const at::Tensor& tensor) { return mine ? shared(tensor) : tensor; };
      expect_sum(rank, *backend, place(torch::empty({3000001})));
      const auto all = place(torch::arange(900006, at::kFloat) + rank.rank());
      const auto part = torch::empty({300002});
      start_reduce_scatter(*backend, part, all)->wait();
      const auto expected = torch::arange(900006, at::kFloat).chunk(3)[rank.rank()] * 3 + 3;
      EXPECT_TRUE(torch::equal(part, expected)) << rank.name();
      const auto gathered = torch::empty({900006});
      start_all_gather(*backend, gathered, place(part))->wait();
      EXPECT_TRUE(torch::equal(gathered, torch::arange(900006, at::kFloat) * 3 + 3)) << rank.name();
    }
  });
}

// What a rank gave may be used again as soon as its own work is done, however late the others are.
TEST(SameHost, MemoryIsTheOwnersAgainWhenItsWorkIsDone) {
  run_processes(3, [](Rank& rank) {
    const auto backend = comm::make_direct(spec_of(rank, "reuse"));
    const auto input = shared(torch::empty({600000}));
    const auto part = torch::empty({200000});
    const auto all = torch::empty({600000});
    for (int step = 0; step < 60; ++step) {
      input.fill_(step + rank.rank());
      start_reduce_scatter(*backend, part, input)->wait();
      input.fill_(-1);
      ASSERT_TRUE((part == 3 * step + 3).all().item<bool>()) << rank.name() << ", step " << step;
      const auto mine = input.narrow(0, 0, 200000).fill_(step);
      start_all_gather(*backend, all, mine)->wait();
      mine.fill_(-1);
      ASSERT_TRUE((all == step).all().item<bool>()) << rank.name() << ", step " << step;
      input.fill_(step);
      start_all_reduce(*backend, input)->wait();
      ASSERT_TRUE((input == 3 * step).all().item<bool>()) << rank.name() << ", step " << step;
    }
  });
}

// And nothing is left of the memory that they shared.
TEST(SameHost, AStoppedProcessIsNamedWhenTheTimeIsOver) {
  ProcessOptions options;
  options.may_fail = {2};
  const auto ended = run_processes(
      3,
      [&](Rank& rank) {
        const auto before = Held::now();
        auto spec = spec_of(rank, "gone");
        spec.timeout = 3s;
        auto backend = comm::make_direct(spec);
        for (const bool in_place : {true, false}) {
          expect_sum(rank, *backend, in_place ? shared(torch::ones({1 << 20})) : torch::ones({1 << 20}));
        }
        if (rank.rank() == 2) {
          rank.store()->set("process", std::to_string(getpid()));
          raise_later(30ms, SIGSTOP);
        }
        auto tensor = shared(torch::ones({1 << 20}));
        const auto train = [&] {
          for (;;) start_all_reduce(*backend, tensor)->wait();
        };
        const auto me =
            c10::str("rank ", rank.rank(), " of 3: an all-reduce (sum) of 1048576 elements of Float failed");
        expect_error<c10::DistBackendError>(train, {me, "rank 2 ", "did not send within 3000 ms"});
        expect_error<c10::DistBackendError>(
            [&] { start_all_reduce(*backend, tensor)->wait(); }, {"earlier collective"});
        backend.reset();
        tensor.reset();
        // The process that is gone had no part in this.
        rank.store()->add("told", 1);
        while (rank.store()->add("told", 0) < 2) std::this_thread::sleep_for(10ms);
        kill(std::stoi(rank.store()->get_to_str("process")), SIGKILL);
        const auto after = Held::now();
        EXPECT_EQ(after.mapped, 0) << rank.name();
        EXPECT_LE(after.files, before.files) << rank.name();
      },
      options);
  EXPECT_EQ(ended[2].signal, SIGKILL);
}

TEST(SameHost, NothingIsLeftOfManyGroups) {
  run_processes(2, [](Rank& rank) {
    // What the first one needs once.
    expect_way(rank, spec_of(rank, "first"), "shared memory");
    const auto before = Held::now();
    for (int i = 0; i < 100; ++i) {
      const auto backend = comm::make_direct(spec_of(rank, c10::str("group ", i)));
      expect_sum(rank, *backend, shared(torch::empty({5000})));
    }
    const auto after = Held::now();
    EXPECT_EQ(after.mapped, 0) << rank.name();
    EXPECT_EQ(after.files, before.files) << rank.name();
  });
}

// A tensor outlives the groups that read it.
TEST(SameHost, TensorsStayWhenTheGroupsAreGone) {
  run_ranks(2, [](Rank& rank) {
    auto backend = comm::make_direct(spec_of(rank, "early"));
    auto tensor = shared(torch::ones({70000}));
    backend.reset();
    EXPECT_TRUE((tensor == 1).all().item<bool>()) << rank.name();
    tensor.resize_({140000}).fill_(2);
    EXPECT_TRUE((tensor == 2).all().item<bool>()) << rank.name();
  });
}

TEST(SameHost, WithoutAGroupMemoryIsOfThisProcessAlone) {
  const auto own = Arena::in_use();
  ASSERT_TRUE(own && own->is_private());
  std::atomic<int64_t> bytes = 0;
  set_shared_memory_listener([&](int64_t change) { bytes += change; });
  {
    const auto tensor = transport::shared_zeros(1000, at::kFloat);
    EXPECT_TRUE(own->holds(tensor.const_data_ptr(), tensor.nbytes()));
    EXPECT_TRUE((tensor == 0).all().item<bool>());
    EXPECT_FALSE(transport::is_shared(tensor));
    EXPECT_EQ(bytes, 4000);
  }
  EXPECT_EQ(bytes, 0);
  {
    const auto arena = Arena::of_this_process();
    ASSERT_TRUE(arena);
    const auto tensor = transport::shared_zeros(1000, at::kFloat);
    EXPECT_TRUE(arena->holds(tensor.const_data_ptr(), tensor.nbytes()));
    EXPECT_EQ(bytes, 4000);
  }
  EXPECT_EQ(bytes, 0);
  set_shared_memory_listener({});
  EXPECT_EQ(Arena::in_use(), own);
}

TEST(SameHost, PiecesOfAnArenaAreUsedAgain) {
  const auto arena = Arena::of_this_process();
  ASSERT_TRUE(arena);
  std::vector<std::byte*> pieces;
  for (int i = 0; i < 4; ++i) {
    pieces.push_back(arena->take(5000));
    std::fill_n(pieces.back(), 5000, std::byte{7});
  }
  for (const int i : {2, 0, 1}) arena->give(pieces[i], 5000);
  // Three neighbours are one piece again, with the pages that were there until the arena is trimmed.
  for (const bool trims : {false, true}) {
    if (trims) Arena::trim();
    auto* whole = arena->take(3 * 8192);
    EXPECT_EQ(whole, pieces[2]);
    EXPECT_EQ(whole[8192], std::byte{trims ? uint8_t{0} : uint8_t{7}});
    EXPECT_EQ(pieces[3][4999], std::byte{7});
    arena->give(whole, 3 * 8192);
  }
  EXPECT_EQ(arena->take(arena->address().bytes), nullptr);
  arena->give(pieces[3], 5000);
}

// Tensors that are older than the first group are in the process's own.
TEST(SameHost, BothArenasAreTrimmed) {
  const auto own = Arena::in_use();
  ASSERT_TRUE(own && own->is_private());
  const auto arena = Arena::of_this_process();
  ASSERT_TRUE(arena);
  for (const auto& each : {own, arena}) {
    auto* piece = each->take(5000);
    std::fill_n(piece, 5000, std::byte{7});
    each->give(piece, 5000);
    Arena::trim();
    EXPECT_EQ(*piece, std::byte{0}) << each->is_private();
  }
}

TEST(SameHost, NobodyCutsMemoryOff) {
  const auto arena = Arena::of_this_process();
  ASSERT_TRUE(arena);
  const auto path = c10::str("/proc/", getpid(), "/fd/", arena->address().file);
  const int file = open(path.c_str(), O_RDWR | O_CLOEXEC);
  ASSERT_GE(file, 0);
  for (const uint64_t bytes : {uint64_t{0}, 2 * arena->address().bytes}) {
    EXPECT_NE(ftruncate(file, static_cast<off_t>(bytes)), 0);
    EXPECT_EQ(errno, EPERM);
  }
  close(file);
}

// A process that was forked, as a loader of data is, cannot use what its parent shares with ranks, gives none of it
// back, and can have an arena of its own.
TEST(SameHost, AForkedProcessLeavesTheMemoryOfItsParent) {
  const auto arena = Arena::of_this_process();
  ASSERT_TRUE(arena);
  auto tensor = shared(torch::full({5000}, 3.));
  const auto child = fork();
  if (child == 0) {
    const auto refused = [&] {
      try {
        return tensor.data_ptr<float>() == nullptr;
      } catch (const std::exception& error) {
        return std::string(error.what()).find("forked from a rank") != std::string::npos;
      }
    }();
    tensor.reset();
    const auto in_use = Arena::in_use();
    const bool has_none = in_use && in_use->is_private();
    const auto own = Arena::of_this_process();
    const auto mine = shared(torch::full({5000}, 4.));
    _exit(refused && has_none && own && mine.data_ptr<float>()[4999] == 4 ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  EXPECT_EQ(tensor.data_ptr<float>()[4999], 3);
}

std::string transport_of(const c10::intrusive_ptr<c10d::ProcessGroup>& group) {
  return group->getBackend(c10::DeviceType::CPU)->getBackendName();
}

void expect_transport(Rank& rank, const std::string& place, std::optional<Transport> asked, const std::string& name) {
  auto options = rank.mesh_options(place).device(at::kCPU);
  if (asked) options.transport(*asked);
  const Mesh mesh({{"world", 4}}, options);
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
    expect_transport(rank, "gloo", Transport::gloo, "gloo");
  });
  const Variables gloo(Environment{{"SHARDWISE_TRANSPORT", "gloo"}});
  run_ranks(4, [](Rank& rank) {
    expect_transport(rank, "variable", {}, "gloo");
    expect_transport(rank, "direct", Transport::direct, "shardwise");
  });
}

} // namespace
} // namespace shardwise::test
