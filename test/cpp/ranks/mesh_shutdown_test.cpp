// How meshes end: on purpose, by themselves, never, in a hurry, and when a peer dies.
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
  return Mesh({{"world", rank.world_size()}}, rank.mesh_options(name).device(at::kCPU).timeout(timeout));
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

TEST(MeshShutdown, RightAfterTheSetUp) {
  // The first to have its connections must not close them while others are still making theirs.
  for (const int slow : {0, 1, 2}) {
    run_ranks(3, [slow](Rank& rank) {
      auto options = rank.mesh_options("mesh").device(at::kCPU).connect_timeout(std::chrono::seconds(20));
      if (rank.rank() == slow) options.store(c10::make_intrusive<SlowStore>("mesh", rank.store()));
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
      const auto options = rank.mesh_options(c10::str("world ", first))
                               .device(at::kCPU)
                               .rank(rank.rank() - first)
                               .world_size(sizes[rank.rank()]);
      for (int i = 0; i < times; ++i) {
        auto mesh = Mesh::from_env(options);
        if (i % 25 == 0) {
          EXPECT_EQ(summed(mesh, i + 1), (i + 1) * mesh.size());
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
      const auto options = rank.mesh_options("failed").device(at::kCPU).rank(1).world_size(2).connect_timeout(
          std::chrono::milliseconds(30));
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
    for (const auto& [set, expected] :
         {std::pair(SIG_DFL, SIG_IGN), std::pair(&handler_of_the_program, &handler_of_the_program)}) {
      const BrokenPipes before(set);
      const auto mesh = make(rank, c10::str("mesh ", set == SIG_DFL));
      EXPECT_EQ(BrokenPipes::now(), expected);
      std::signal(SIGPIPE, set);
      Mesh::from_process_groups({"world"}, {mesh.group("world")}, at::kCPU);
      EXPECT_EQ(BrokenPipes::now(), expected);
    }
  });
}

} // namespace
} // namespace shardwise::test
