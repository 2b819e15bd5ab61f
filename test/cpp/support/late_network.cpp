#include "support/late_network.h"

#include <c10/util/StringUtil.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <algorithm>
#include <array>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <list>
#include <map>
#include <mutex>

namespace shardwise::test {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::microseconds;

/// All bits: NaN for floating point numbers, -1 for others.
constexpr uint8_t kPoison = 0xff;

enum class Kind { all_gather, reduce_scatter, all_reduce, broadcast };
constexpr std::array<const char*, 4> kNames{"all-gather", "reduce-scatter", "all-reduce", "broadcast"};

// splitmix64
uint64_t mix(uint64_t value) {
  value += 0x9e3779b97f4a7c15ULL;
  value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9ULL;
  value = (value ^ (value >> 27)) * 0x94d049bb133111ebULL;
  return value ^ (value >> 31);
}

uint8_t* bytes_of(const at::Tensor& tensor) {
  return static_cast<uint8_t*>(tensor.data_ptr());
}

bool has_memory(const at::Tensor& tensor) {
  const auto end = (tensor.storage_offset() + tensor.numel()) * static_cast<int64_t>(tensor.itemsize());
  return tensor.storage().nbytes() >= static_cast<size_t>(end);
}

template <typename Number>
void add(uint8_t* sum, const uint8_t* values, size_t bytes) {
  auto* to = reinterpret_cast<Number*>(sum);
  const auto* from = reinterpret_cast<const Number*>(values);
  for (size_t i = 0; i < bytes / sizeof(Number); ++i) to[i] += from[i];
}

/// When a result comes.
struct Lateness {
  /// Not before a rank waits for it.
  bool when_wanted = false;
  microseconds delay{0};
};

} // namespace

class LateNetwork::Work : public c10d::Work {
 public:
  explicit Work(std::shared_ptr<State> state) : state_(std::move(state)) {}
  bool wait(std::chrono::milliseconds timeout) override;
  void end(std::exception_ptr error = nullptr) {
    finish(std::move(error));
  }

  bool wanted = false;

 private:
  std::shared_ptr<State> state_;
};

struct LateNetwork::State {
  /// What one rank brings to a collective.
  struct Part {
    at::Tensor output;
    at::Tensor input;
    /// As it was at the launch: what a sum in place overwrites.
    std::vector<uint8_t> at_launch;
    c10::intrusive_ptr<Work> work;
    Lateness lateness;
    Clock::time_point since;
    bool done = false;
  };
  struct Collective {
    int group;
    uint64_t number;
    Kind kind;
    int root;
    std::vector<Part> parts;
    size_t joined = 0;
    size_t done = 0;
    /// Of all ranks, as read when the first of them got its result.
    std::vector<std::vector<uint8_t>> inputs = {};

    std::string name() const {
      return c10::str("the ", kNames.at(static_cast<size_t>(kind)), " number ", number, " of group ", group);
    }
    bool ready() const {
      return joined == parts.size();
    }
  };

  explicit State(int ranks) : world(static_cast<size_t>(ranks)), seeds(world, 0), numbers(world) {}

  const size_t world;
  mutable std::mutex mutex;
  std::condition_variable changed;
  std::list<Collective> collectives;
  std::vector<uint64_t> seeds;
  /// How many collectives a rank has launched, by group.
  std::vector<std::map<int, uint64_t>> numbers;
  std::vector<std::string> complaints;
  int64_t most_open = 0;
  int64_t overtaken = 0;
  bool closed = false;

  static std::exception_ptr closed_error() {
    return std::make_exception_ptr(std::runtime_error("Connection closed by peer: the late network was closed"));
  }

  Lateness draw(size_t rank, int group, uint64_t number) const {
    const auto seed = seeds[rank];
    if (seed == 0) return {};
    const auto drawn = mix(mix(mix(seed) ^ number) ^ (static_cast<uint64_t>(group) * world + rank));
    constexpr std::array<int, 4> kMost{1, 400, 150, 1};
    const auto choice = drawn % kMost.size();
    return {choice >= 2, microseconds((drawn >> 8) % kMost.at(choice))};
  }

  Collective& join(Kind kind, int group, uint64_t number, int root) {
    for (auto& collective : collectives) {
      if (collective.group != group || collective.number != number) continue;
      if (collective.kind != kind || collective.root != root) differ(collective);
      return collective;
    }
    auto& made = collectives.emplace_back(Collective{group, number, kind, root, std::vector<Part>(world)});
    most_open = std::max(most_open, static_cast<int64_t>(collectives.size()));
    return made;
  }

  [[noreturn]] static void differ(const Collective& collective) {
    throw std::runtime_error("the ranks do not call " + collective.name() + " alike");
  }

  void complain(const Collective& collective, const std::string& what) {
    complaints.push_back(collective.name() + " " + what);
  }

  c10::intrusive_ptr<c10d::Work> launch(
      const std::shared_ptr<State>& self, Kind kind, int group, int rank_number, const at::Tensor& output,
      const at::Tensor& input, int root) {
    const auto rank = static_cast<size_t>(rank_number);
    auto work = c10::make_intrusive<Work>(self);
    const std::lock_guard lock(mutex);
    if (closed) {
      work->end(closed_error());
      return work;
    }
    const auto number = numbers[rank][group]++;
    auto& collective = join(kind, group, number, root);
    for (const auto& other : collective.parts) {
      if (other.work && other.at_launch.size() != input.nbytes()) differ(collective);
    }
    auto& part = collective.parts[rank];
    part = {output, input, {}, work, draw(rank, group, number), Clock::now()};
    part.at_launch.assign(bytes_of(input), bytes_of(input) + input.nbytes());
    const bool keeps = kind == Kind::broadcast && rank_number == root;
    if (!keeps) std::memset(bytes_of(output), kPoison, output.nbytes());
    ++collective.joined;
    changed.notify_all();
    return work;
  }

  /// The next result to come, and when; none when all wait for a rank.
  struct Next {
    std::list<Collective>::iterator collective;
    size_t rank = 0;
    Clock::time_point due = Clock::time_point::max();
  };
  Next next() {
    Next first{collectives.end()};
    for (auto it = collectives.begin(); it != collectives.end(); ++it) {
      if (!it->ready()) continue;
      for (size_t rank = 0; rank < world; ++rank) {
        const auto& part = it->parts[rank];
        if (part.done || (part.lateness.when_wanted && !part.work->wanted)) continue;
        const auto due = part.since + part.lateness.delay;
        if (due < first.due) first = {it, rank, due};
      }
    }
    return first;
  }

  void run() {
    std::unique_lock lock(mutex);
    while (!closed) {
      const auto first = next();
      if (first.collective == collectives.end()) {
        changed.wait(lock);
      } else if (Clock::now() < first.due) {
        changed.wait_until(lock, first.due);
      } else {
        deliver(*first.collective, first.rank);
        if (first.collective->done == world) remove(first.collective);
      }
    }
    for (auto& collective : collectives) {
      for (auto& part : collective.parts) {
        if (part.work && !part.done) part.work->end(closed_error());
      }
    }
    collectives.clear();
  }

  void remove(std::list<Collective>::iterator ended) {
    overtaken += std::any_of(collectives.begin(), ended, [](const auto& earlier) { return earlier.ready(); }) ? 1 : 0;
    collectives.erase(ended);
  }

  void deliver(Collective& collective, size_t rank) {
    if (collective.done == 0) read_inputs(collective);
    auto& part = collective.parts[rank];
    check_unchanged(collective, rank);
    write_output(collective, rank);
    part.done = true;
    ++collective.done;
    // Nothing is held any more when the rank learns that it is done.
    part.output = at::Tensor();
    part.input = at::Tensor();
    part.work->end();
  }

  void read_inputs(Collective& collective) {
    for (auto& part : collective.parts) {
      if (collective.kind == Kind::all_reduce) {
        collective.inputs.push_back(part.at_launch);
      } else if (has_memory(part.input)) {
        collective.inputs.emplace_back(bytes_of(part.input), bytes_of(part.input) + part.input.nbytes());
      } else {
        complain(collective, "had its input freed");
        collective.inputs.emplace_back(part.input.nbytes(), kPoison);
      }
    }
  }

  void check_unchanged(const Collective& collective, size_t rank) {
    const auto& part = collective.parts[rank];
    // What is gathered may change: its owner gathers again.
    if (collective.kind == Kind::reduce_scatter &&
        (!has_memory(part.input) ||
         std::memcmp(bytes_of(part.input), part.at_launch.data(), part.at_launch.size()) != 0)) {
      complain(collective, c10::str("had its input changed on rank ", rank));
    }
    if (!has_memory(part.output)) {
      complain(collective, c10::str("had its output freed on rank ", rank));
      return;
    }
    if (collective.kind == Kind::broadcast) return;
    const auto* bytes = bytes_of(part.output);
    if (std::any_of(bytes, bytes + part.output.nbytes(), [](uint8_t byte) { return byte != kPoison; })) {
      complain(collective, c10::str("had its output written on rank ", rank));
    }
  }

  void write_output(const Collective& collective, size_t rank) {
    const auto& output = collective.parts[rank].output;
    if (!has_memory(output)) return;
    auto* to = bytes_of(output);
    const auto size = output.nbytes();
    switch (collective.kind) {
      case Kind::all_gather:
        for (const auto& input : collective.inputs) to = std::copy(input.begin(), input.end(), to);
        break;
      case Kind::broadcast:
        std::memcpy(to, collective.inputs[static_cast<size_t>(collective.root)].data(), size);
        break;
      case Kind::all_reduce:
      case Kind::reduce_scatter:
        std::memset(to, 0, size);
        const auto start = collective.kind == Kind::all_reduce ? 0 : rank * size;
        for (const auto& input : collective.inputs) {
          output.scalar_type() == at::kDouble ? add<double>(to, input.data() + start, size)
                                              : add<float>(to, input.data() + start, size);
        }
        break;
    }
  }
};

bool LateNetwork::Work::wait(std::chrono::milliseconds timeout) {
  {
    const std::lock_guard lock(state_->mutex);
    wanted = true;
    state_->changed.notify_all();
  }
  return c10d::Work::wait(timeout);
}

class LateNetwork::Backend : public c10d::Backend {
 public:
  Backend(std::shared_ptr<State> state, int group, int rank)
      : c10d::Backend(rank, static_cast<int>(state->world)),
        state_(std::move(state)),
        group_(group) {}

  const std::string getBackendName() const override {
    return "late";
  }
  c10::intrusive_ptr<c10d::Work> _allgather_base(
      at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions&) override {
    TORCH_CHECK(output.nbytes() == input.nbytes() * state_->world);
    return launch(Kind::all_gather, output, input);
  }
  c10::intrusive_ptr<c10d::Work> _reduce_scatter_base(
      at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& options) override {
    TORCH_CHECK(input.nbytes() == output.nbytes() * state_->world);
    check_sum(options.reduceOp, input);
    return launch(Kind::reduce_scatter, output, input);
  }
  c10::intrusive_ptr<c10d::Work> allreduce(
      std::vector<at::Tensor>& tensors, const c10d::AllreduceOptions& options) override {
    check_sum(options.reduceOp, tensors.at(0));
    return launch(Kind::all_reduce, tensors.at(0), tensors.at(0));
  }
  c10::intrusive_ptr<c10d::Work> broadcast(
      std::vector<at::Tensor>& tensors, const c10d::BroadcastOptions& options) override {
    return launch(Kind::broadcast, tensors.at(0), tensors.at(0), static_cast<int>(options.rootRank));
  }
  void shutdown() override {
    const std::lock_guard lock(state_->mutex);
    state_->closed = true;
    state_->changed.notify_all();
  }

 private:
  static void check_sum(const c10d::ReduceOp& operation, const at::Tensor& tensor) {
    TORCH_CHECK(operation == c10d::ReduceOp::SUM, "a late network only sums");
    TORCH_CHECK(tensor.scalar_type() == at::kFloat || tensor.scalar_type() == at::kDouble);
  }
  c10::intrusive_ptr<c10d::Work> launch(Kind kind, const at::Tensor& output, const at::Tensor& input, int root = 0) {
    TORCH_CHECK(output.is_contiguous() && input.is_contiguous());
    return state_->launch(state_, kind, group_, getRank(), output, input, root);
  }

  std::shared_ptr<State> state_;
  int group_;
};

LateNetwork::LateNetwork(int ranks)
    : state_(std::make_shared<State>(ranks)),
      courier_([state = state_] { state->run(); }) {}

LateNetwork::~LateNetwork() {
  close();
  courier_.join();
}

c10::intrusive_ptr<c10d::Backend> LateNetwork::backend(int group, int rank) {
  return c10::make_intrusive<Backend>(state_, group, rank);
}

void LateNetwork::be_late(int rank, uint64_t seed) {
  const std::lock_guard lock(state_->mutex);
  state_->seeds.at(static_cast<size_t>(rank)) = mix(seed) | 1;
}

void LateNetwork::close() {
  const std::lock_guard lock(state_->mutex);
  state_->closed = true;
  state_->changed.notify_all();
}

std::vector<std::string> LateNetwork::complaints() const {
  const std::lock_guard lock(state_->mutex);
  return state_->complaints;
}

int64_t LateNetwork::most_open() const {
  const std::lock_guard lock(state_->mutex);
  return state_->most_open;
}

int64_t LateNetwork::overtaken() const {
  const std::lock_guard lock(state_->mutex);
  return state_->overtaken;
}

} // namespace shardwise::test
