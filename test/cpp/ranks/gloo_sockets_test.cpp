// The ports and connections of process groups: who may come in, and what a forked child keeps.
#include "ranks/transport_groups.h"
#include "support/expect.h"
#include "support/processes.h"

#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <csignal>
#include <filesystem>
#include <thread>

namespace shardwise::test {
namespace {

using Clock = std::chrono::steady_clock;
using namespace std::chrono_literals;

std::vector<int> descriptors() {
  std::vector<int> all;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    all.push_back(std::stoi(entry.path().filename()));
  }
  return all;
}

/// Where sockets of this process listen.
std::vector<sockaddr_storage> doors() {
  std::vector<sockaddr_storage> addresses;
  for (const int file : descriptors()) {
    int listens = 0;
    socklen_t size = sizeof listens;
    if (getsockopt(file, SOL_SOCKET, SO_ACCEPTCONN, &listens, &size) != 0 || listens == 0) continue;
    sockaddr_storage address{};
    size = sizeof address;
    if (getsockname(file, reinterpret_cast<sockaddr*>(&address), &size) == 0) addresses.push_back(address);
  }
  return addresses;
}

bool lets_in(const sockaddr_storage& address) {
  const int file = socket(address.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  const auto* target = reinterpret_cast<const sockaddr*>(&address);
  bool is_in = connect(file, target, sizeof address) == 0;
  pollfd ready{file, POLLOUT, 0};
  if (!is_in && poll(&ready, 1, 300) == 1) {
    int error = 0;
    socklen_t size = sizeof error;
    is_in = getsockopt(file, SOL_SOCKET, SO_ERROR, &error, &size) == 0 && error == 0;
  }
  close(file);
  return is_in;
}

} // namespace

TEST(GlooSockets, StrangersGetNoAnswer) {
  run_processes(2, [](Rank& rank) {
    through_shared_memory() = false;
    const auto backend = make_backend(rank, "doors");
    start_all_reduce(*backend, torch::ones({3}))->wait();
    const auto ours = doors();
    EXPECT_FALSE(ours.empty()) << "Gloo listens somewhere";
    const auto before = descriptors().size();
    for (const auto& door : ours) EXPECT_FALSE(lets_in(door)) << rank.name();
    EXPECT_EQ(descriptors().size(), before) << rank.name() << " keeps a stranger's connection";
    const auto sum = torch::ones({100000});
    start_all_reduce(*backend, sum)->wait();
    EXPECT_EQ(sum[99999].item<float>(), 2);
  });
}

TEST(GlooSockets, AChildKeepsNoConnectionOfADeadRank) {
  ProcessOptions options;
  options.may_fail = {0};
  const auto ended = run_processes(
      2,
      [](Rank& rank) {
        through_shared_memory() = false;
        const auto backend = make_backend(rank, "child");
        start_all_reduce(*backend, torch::ones({50000}))->wait();
        if (rank.rank() == 0) {
          // As a loader's worker, which learns of its parent's death seconds later.
          if (fork() == 0) {
            for (const int output : {1, 2}) close(output);
            std::this_thread::sleep_for(12s);
            _exit(0);
          }
          std::raise(SIGKILL);
        }
        const auto begin = Clock::now();
        EXPECT_ANY_THROW(start_all_reduce(*backend, torch::ones({50000}))->wait());
        EXPECT_LT(Clock::now() - begin, 8s);
      },
      options);
  EXPECT_EQ(ended[0].signal, SIGKILL);
}

} // namespace shardwise::test
