// How meshes end: on purpose, by themselves, never, in a hurry, and when a peer dies.
#include "comm/collectives/collectives.h"
#include "support/expect.h"
#include "support/form.h"
#include "support/processes.h"
#include "support/ranks.h"

#include <shardwise/error.h>

#include <gtest/gtest.h>
#include <torch/torch.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <csignal>
#include <filesystem>
#include <memory>
#include <thread>

namespace shardwise::test {
namespace {

using Clock = std::chrono::steady_clock;

double summed(const Mesh& mesh, double value) {
  std::vector<at::Tensor> tensors{torch::full({100}, value, torch::kDouble)};
  mesh.group("world")->allreduce(tensors)->wait();
  return tensors[0][99].item<double>();
}

/// A mesh of its own for every name.
Mesh make(Rank& rank, const std::string& name, std::chrono::milliseconds timeout = std::chrono::seconds(60)) {
  const auto options = MeshOptions()
                           .device(at::kCPU)
                           .connect_timeout(std::chrono::seconds(60))
                           .timeout(timeout)
                           .store(c10::make_intrusive<c10d::PrefixStore>(name, rank.store()))
                           .rank(rank.rank())
                           .world_size(rank.world_size());
  return Mesh({{"world", rank.world_size()}}, options);
}

/// A store that is far away: every answer takes some time.
class SlowStore : public c10d::PrefixStore {
 public:
  using c10d::PrefixStore::PrefixStore;
  using c10d::PrefixStore::wait;
  std::vector<uint8_t> get(const std::string& key) override {
    delay();
    return c10d::PrefixStore::get(key);
  }
  std::vector<std::vector<uint8_t>> multiGet(const std::vector<std::string>& keys) override {
    delay();
    return c10d::PrefixStore::multiGet(keys);
  }
  void wait(const std::vector<std::string>& keys, const std::chrono::milliseconds& timeout) override {
    delay();
    c10d::PrefixStore::wait(keys, timeout);
  }

 private:
  static void delay() {
    std::this_thread::sleep_for(std::chrono::milliseconds(30));
  }
};

int64_t entries(const char* folder) {
  const std::filesystem::directory_iterator all(folder);
  return std::distance(begin(all), end(all));
}

/// What a process holds of things that can leak.
struct Holdings {
  int64_t descriptors = entries("/proc/self/fd");
  int64_t threads = entries("/proc/self/task");
};

/// A thread is gone a moment after it was joined.
void expect_no_more_than(const Holdings& before) {
  Holdings now;
  for (int i = 0; i < 200 && (now.threads > before.threads || now.descriptors > before.descriptors); ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(25));
    now = Holdings();
  }
  EXPECT_LE(now.descriptors, before.descriptors);
  EXPECT_LE(now.threads, before.threads);
}

/// Sets what SIGPIPE does, and puts it back.
class BrokenPipes {
 public:
  explicit BrokenPipes(sighandler_t handler) : before_(std::signal(SIGPIPE, handler)) {}
  ~BrokenPipes() {
    std::signal(SIGPIPE, before_);
  }
  static sighandler_t now() {
    struct sigaction current {};
    sigaction(SIGPIPE, nullptr, &current);
    return current.sa_handler;
  }

 private:
  sighandler_t before_;
};

void handler_of_the_program(int) {}

TEST(MeshShutdown, NoGroupsAfterwards) {
  run_ranks(2, [](Rank& rank) {
    auto mesh = make(rank, "afterwards");
    const auto copy = mesh;
    mesh.shutdown();
    const auto text = c10::str("Mesh(world=2; rank ", rank.rank(), " on cpu) was shut down");
    expect_error<Error>([&] { mesh.group("world"); }, {text});
    expect_error<Error>([&] { copy.group("world"); }, {text});
    expect_error<ValueError>([&] { mesh.group("shard"); }, {"no axis 'shard'"});
  });
}

TEST(MeshShutdown, CopiesShareTheirGroups) {
  run_ranks(2, [](Rank& rank) {
    auto mesh = std::make_unique<Mesh>(make(rank, "copies"));
    const auto copy = *mesh;
    EXPECT_EQ(copy.group("world"), mesh->group("world"));
    mesh.reset();
    EXPECT_EQ(summed(copy, rank.rank() + 1), 3) << "closed while a copy lives";
  });
}

TEST(MeshShutdown, RightAfterTheSetUp) {
  // The first to have its connections must not close them while others are still making theirs.
  for (const int slow : {0, 1, 2}) {
    run_ranks(3, [slow](Rank& rank) {
      c10::intrusive_ptr<c10d::Store> store = c10::make_intrusive<c10d::PrefixStore>("mesh", rank.store());
      if (rank.rank() == slow) store = c10::make_intrusive<SlowStore>("mesh", rank.store());
      const auto options = MeshOptions()
                               .device(at::kCPU)
                               .connect_timeout(std::chrono::seconds(20))
                               .store(store)
                               .rank(rank.rank())
                               .world_size(3);
      for (int i = 0; i < 3; ++i) EXPECT_EQ(Mesh::from_env(options).rank(), rank.rank());
    });
  }
}

TEST(MeshShutdown, DuringAnException) {
  for (const bool busy : {false, true}) {
    const auto start = Clock::now();
    run_ranks(2, [busy](Rank& rank) {
      c10::intrusive_ptr<c10d::Work> work;
      try {
        const auto mesh = make(rank, "exception", std::chrono::seconds(1));
        EXPECT_EQ(summed(mesh, 1), 2);
        // Nobody waits for it, and the other rank never joins it.
        std::vector<at::Tensor> tensors{torch::ones(3)};
        if (busy && rank.rank() == 0) work = mesh.group("world")->allreduce(tensors);
        if (rank.rank() == 1) rank.store()->get("rank 0 is out");
        throw std::runtime_error("on its way");
      } catch (const std::runtime_error& error) {
        EXPECT_STREQ(error.what(), "on its way");
      }
      rank.store()->set("rank 0 is out", std::string("yes"));
    });
    EXPECT_LT(Clock::now() - start, std::chrono::seconds(30));
  }
}

TEST(MeshShutdown, NeverIsFine) {
  const auto results = run_processes(2, [](Rank& rank) {
    // One lives until the statics go, one is never destroyed, one is from the environment.
    static const Mesh kept = make(rank, "static");
    static const Mesh* const leaked = new Mesh(make(rank, "leaked"));
    static const Mesh* const world = new Mesh(Mesh::from_env(MeshOptions().device(at::kCPU)));
    EXPECT_EQ(summed(kept, 1) + summed(*leaked, 1) + summed(*world, 1), 6);
    std::cout << "the last words of " << rank.name() << std::endl;
  });
  for (const auto& ended : results) {
    const auto rest = ended.output.substr(std::min(ended.output.find("the last words"), ended.output.size()));
    EXPECT_EQ(std::count(rest.begin(), rest.end(), '\n'), 1) << "something was printed at the end:\n" << rest;
  }
}

TEST(MeshShutdown, ManyMeshesLeakNothing) {
  // Worlds of 1, 1, 2 and 3 ranks at the same time, since a mesh spends its time waiting.
  const auto make_many = [](int times) {
    const std::vector<int> firsts{0, 1, 2, 2, 4, 4, 4};
    const std::vector<int> sizes{1, 1, 2, 2, 3, 3, 3};
    run_ranks(7, [&](Rank& rank) {
      const int first = firsts[rank.rank()];
      const auto options = MeshOptions()
                               .device(at::kCPU)
                               .store(c10::make_intrusive<c10d::PrefixStore>(c10::str("world ", first), rank.store()))
                               .rank(rank.rank() - first)
                               .world_size(sizes[rank.rank()]);
      for (int i = 0; i < times; ++i) {
        auto mesh = Mesh::from_env(options);
        if (i % 25 == 0) {
          EXPECT_EQ(summed(mesh, i), i * mesh.size());
        }
        if (i % 3 == 0) mesh.shutdown();
      }
    });
  };
  // Threads and descriptors that torch makes once and keeps.
  make_many(2);
  const Holdings before;
  const auto start = Clock::now();
  const int times = by_form(25, 250);
  make_many(times);
  expect_no_more_than(before);
  std::cout << 4 * times << " meshes in " << std::chrono::duration<double>(Clock::now() - start).count() << " s\n";
}

TEST(MeshShutdown, FailedMeshesLeakNothing) {
  const auto fail = [] {
    run_ranks(1, [](Rank& rank) {
      const auto options = MeshOptions()
                               .device(at::kCPU)
                               .store(rank.store())
                               .rank(1)
                               .world_size(2)
                               .connect_timeout(std::chrono::milliseconds(30));
      expect_error<PeerError>([&] { Mesh({{"world", 2}}, options); }, {"rank 1 of 2"});
    });
  };
  fail();
  const Holdings before;
  for (int i = 0; i < 20; ++i) fail();
  expect_no_more_than(before);
}

TEST(MeshShutdown, BrokenPipesAreIgnored) {
  run_ranks(1, [](Rank& rank) {
    const BrokenPipes untouched(SIG_DFL);
    const auto mesh = make(rank, "mesh");
    EXPECT_EQ(BrokenPipes::now(), SIG_IGN);
    std::signal(SIGPIPE, SIG_DFL);
    Mesh::from_process_groups({"world"}, {mesh.group("world")}, at::kCPU);
    EXPECT_EQ(BrokenPipes::now(), SIG_IGN);
  });
}

TEST(MeshShutdown, AHandlerOfTheProgramStays) {
  run_ranks(1, [](Rank& rank) {
    const BrokenPipes handled(handler_of_the_program);
    const auto mesh = make(rank, "mesh");
    Mesh::from_process_groups({"world"}, {mesh.group("world")}, at::kCPU);
    EXPECT_EQ(BrokenPipes::now(), handler_of_the_program);
  });
}

} // namespace
} // namespace shardwise::test
