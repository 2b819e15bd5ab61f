// Random programs of streams and events: the checker reports exactly what a search for a path between two operations
// finds, and a program in which nothing is missing computes what it does without streams.
#include "late_test.h"

#include "late_device/history.h"

#include <random>

namespace shardwise::test {
namespace {

/// A program of a few streams over one block, without a device: operations, events and waits of the host.
class Program {
 public:
  explicit Program(uint64_t seed) : random_(seed) {}

  void run() {
    for (int step = 0; step < 40; ++step) {
      switch (pick(6)) {
        case 0:
          events_.push_back(record(pick(kStreams)));
          break;
        case 1:
          if (!events_.empty()) wait(pick(kStreams), events_[pick(events_.size())]);
          break;
        case 2:
          if (pick(4) == 0) host_waits(pick(kStreams));
          break;
        default:
          operate(pick(kStreams));
          break;
      }
    }
  }
  int conflicts() const {
    return conflicts_;
  }

 private:
  static constexpr size_t kStreams = 4;
  static constexpr size_t kBytes = 12;
  struct Node {
    late::Moment moment;
    size_t begin;
    size_t end;
    bool writes;
    /// What is directly before it.
    std::vector<size_t> before;
  };
  struct Event {
    late::Clock clock;
    std::vector<size_t> nodes;
  };

  size_t pick(size_t below) {
    return random_() % below;
  }
  bool is_before(size_t earlier, size_t later) const {
    if (earlier == later) return true;
    return std::any_of(nodes_[later].before.begin(), nodes_[later].before.end(), [&](size_t each) {
      return each >= earlier && is_before(earlier, each);
    });
  }
  Event record(size_t stream) {
    clocks_[stream].join(host_);
    join(ends_[stream], host_ends_);
    return {clocks_[stream], ends_[stream]};
  }
  static void join(std::vector<size_t>& all, const std::vector<size_t>& more) {
    all.insert(all.end(), more.begin(), more.end());
  }
  void wait(size_t stream, const Event& event) {
    clocks_[stream].join(event.clock);
    join(ends_[stream], event.nodes);
  }
  void host_waits(size_t stream) {
    const auto event = record(stream);
    host_.join(event.clock);
    join(host_ends_, event.nodes);
  }
  void operate(size_t stream) {
    auto& clock = clocks_[stream];
    clock.join(host_);
    auto before = ends_[stream];
    join(before, host_ends_);
    const auto begin = pick(kBytes);
    Node node{clock.next(stream), begin, begin + 1 + pick(kBytes - begin), pick(2) == 0, before};
    nodes_.push_back(node);
    const auto self = nodes_.size() - 1;
    bool wanted = false;
    for (size_t other = 0; other < self; ++other) {
      const auto& earlier = nodes_[other];
      const bool meet = earlier.begin < node.end && node.begin < earlier.end && (earlier.writes || node.writes);
      // Only the last write of a byte counts, and the reads since; an older one was told of when that write came.
      if (meet && is_last(other, node) && !is_before(other, self)) wanted = true;
    }
    const auto found = history_.access(node.begin, node.end, node.writes, {"operation", node.moment}, clock);
    ASSERT_EQ(found.has_value(), wanted) << "operation " << self << " of stream " << stream;
    conflicts_ += wanted ? 1 : 0;
    ends_[stream] = {self};
  }
  /// Whether some byte that both touch was not written between the two, and no later read of the same stream hides it.
  bool is_last(size_t index, const Node& now) const {
    const auto& earlier = nodes_[index];
    for (auto byte = std::max(earlier.begin, now.begin); byte < std::min(earlier.end, now.end); ++byte) {
      bool hidden = false;
      for (size_t k = index + 1; k + 1 < nodes_.size(); ++k) {
        const auto& between = nodes_[k];
        if (byte < between.begin || byte >= between.end) continue;
        if (between.writes) hidden = true;
      }
      if (!hidden) return true;
    }
    return false;
  }

  std::mt19937_64 random_;
  late::Clock clocks_[kStreams];
  late::Clock host_;
  std::vector<size_t> ends_[kStreams];
  std::vector<size_t> host_ends_;
  std::vector<Event> events_;
  std::vector<Node> nodes_;
  late::History history_{kBytes};
  int conflicts_ = 0;
};

} // namespace

TEST(LatePrograms, TheCheckerFindsWhatASearchFinds) {
  int conflicts = 0;
  for (uint64_t seed = 0; seed < 10000; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    Program program(seed);
    program.run();
    conflicts += program.conflicts();
    if (testing::Test::HasFailure()) return;
  }
  // Most programs have some, and most operations none.
  EXPECT_GT(conflicts, 10000);
}

TEST(LatePrograms, OrderedProgramsComputeWhatOneStreamDoes) {
  for (uint64_t seed = 0; seed < 100; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937_64 random(seed);
    const auto index = static_cast<int>(seed % 3);
    std::vector<c10::Stream> streams{late::current_stream(index)};
    for (int k = 0; k < 3; ++k) streams.push_back(late::Device::of(index).take_stream());
    std::vector<at::Tensor> theirs;
    std::vector<at::Tensor> ours;
    for (int k = 0; k < 4; ++k) {
      theirs.push_back(at::full({64}, k + 1, at::kDouble));
      ours.push_back(theirs.back().to(late_device(index)));
    }
    // Each tensor knows after whose work it may be used.
    std::vector<std::vector<c10::Stream>> users(4, {streams[0]});
    for (int step = 0; step < 60; ++step) {
      const auto to = random() % 4;
      const auto from = random() % 4;
      const auto& stream = streams[random() % streams.size()];
      for (const auto tensor : {to, from}) {
        for (const auto& user : users[tensor]) {
          c10::Event event(at::kPrivateUse1);
          event.record(user);
          event.block(stream);
        }
      }
      const c10::StreamGuard guard(stream);
      const auto change = [&](std::vector<at::Tensor>& tensors) { tensors[to].mul_(0.5).add_(tensors[from], 0.25); };
      change(ours);
      change(theirs);
      users[to] = {stream};
      users[from].push_back(stream);
    }
    late::Device::of(index).synchronize_all();
    for (int k = 0; k < 4; ++k) expect_same(ours[k], theirs[k], "tensor " + std::to_string(k));
    for (size_t k = 1; k < streams.size(); ++k) late::Device::of(index).give_stream(streams[k]);
    expect_no_fault();
    if (testing::Test::HasFailure()) return;
  }
}

} // namespace shardwise::test
