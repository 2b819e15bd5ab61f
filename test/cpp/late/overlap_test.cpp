// How long a step takes in virtual time: what hides behind what, whatever the machine does.
#include "late_test.h"
#include "ranks/hybrid_models.h"

namespace shardwise::test::overlap {
namespace {

constexpr int kLayers = 8;
/// Of one product of matrices. A layer takes one in its forward, and two in its backward.
constexpr double kProduct = 10;

/// Of one collective of each kind.
struct Traffic {
  double gather = 0;
  double scatter = 0;
  double all_reduce = 0;
  double to_host = 0;
  double from_host = 0;
};

class Costs {
 public:
  explicit Costs(Traffic traffic) {
    late::set_costs([traffic](const std::string& name, size_t) {
      if (name == "all_gather") return traffic.gather;
      if (name == "reduce_scatter") return traffic.scatter;
      if (name == "all_reduce") return traffic.all_reduce;
      if (name == "copy to the host") return traffic.to_host;
      if (name == "copy from the host") return traffic.from_host;
      return name == "aten::mm" ? kProduct : 0.0;
    });
  }
  Costs(const Costs&) = delete;
  Costs& operator=(const Costs&) = delete;
  ~Costs() {
    late::set_costs({});
  }
};

struct Way {
  const char* name;
  int world;
  std::function<void(Rank&, torch::nn::Sequential&)> wrap;
  bool gathers_in_forward;
  bool gathers_in_backward;
  bool scatters;
  bool all_reduces;
  bool offloads = false;
};

void shard(const FullyShardOptions& options, torch::nn::Sequential& model) {
  for (const auto& layer : *model) fully_shard(layer.ptr(), options);
  fully_shard(model.ptr(), options);
}

struct Times {
  double forward;
  double backward;
};

/// Of a step, once some were made; the same on every rank.
Times measure(Traffic traffic, const Way& way) {
  const Costs costs(traffic);
  std::vector<Times> times(way.world);
  run_ranks(way.world, [&](Rank& rank) {
    torch::nn::Sequential model;
    for (int i = 0; i < kLayers; ++i) {
      model->push_back(torch::nn::Linear(torch::nn::LinearOptions(8, 8).bias(false)));
    }
    model->to(rank.device());
    way.wrap(rank, model);
    const auto x = torch::ones({4, 8}, rank.device()).requires_grad_();
    auto& device = late::Device::of(rank.rank());
    const auto now = [&] {
      rank.mesh().barrier();
      device.synchronize_all();
      return device.host_time();
    };
    for (int step = 0; step < 4; ++step) {
      const auto begin = now();
      const auto y = call(model, x);
      const auto between = now();
      y.sum().backward();
      device.synchronize_all();
      // The barrier between is an all-reduce, and its result is read.
      times[rank.rank()] = {between - begin - traffic.all_reduce - traffic.to_host, device.host_time() - between};
      for (const auto& parameter : model->parameters()) parameter.mutable_grad().reset();
    }
  });
  for (const auto& each : times) {
    EXPECT_EQ(each.forward, times[0].forward);
    EXPECT_EQ(each.backward, times[0].backward);
  }
  return times[0];
}

/// Each layer computes once it is gathered (and before that copied from the host), and is summed once it was computed;
/// gathers go on in a row, sums over shards too, sums over copies, and copies to the host. Nothing else waits for
/// anything.
double least(double work, double gather, double scatter, double all_reduce, double to_host = 0) {
  double gathered = 0, computed = 0, scattered = 0, reduced = 0, copied = 0;
  for (int i = 0; i < kLayers; ++i) {
    gathered += gather;
    computed = std::max(computed, gathered) + work;
    scattered = std::max(scattered, computed) + scatter;
    reduced = std::max(reduced, scattered) + all_reduce;
    copied = std::max(copied, reduced) + to_host;
  }
  return copied;
}

const std::vector<Way> kWays{
    {"sharded", 2, [](Rank& rank, auto& model) { shard(sharded_on(rank), model); }, true, true, true, false},
    {"kept", 2, [](Rank& rank, auto& model) { shard(sharded_on(rank).reshard_after_forward(false), model); }, true,
     false, true, false},
    {"flat", 2, [](Rank& rank, auto& model) { shard(sharded_on(rank).layout(ShardLayout::flat), model); }, true, true,
     true, false},
    {"hybrid", 4,
     [](Rank& rank, auto& model) {
       shard(hybrid_on(rank, {2, 2}), model);
     },
     true, true, true, true},
    {"replicated", 2,
     [](Rank& rank, auto& model) {
       for (const auto& layer : *model) replicate(layer.ptr(), ReplicateOptions().mesh(rank.mesh()));
       replicate(model.ptr(), ReplicateOptions().mesh(rank.mesh()));
     },
     false, false, false, true},
    {"offloaded", 2, [](Rank& rank, auto& model) { shard(sharded_on(rank).cpu_offload(CpuOffload()), model); }, true,
     true, true, false, true}};

} // namespace

TEST(LateOverlap, NothingWaitsThatNeedNot) {
  // Computing takes longest; sums over copies, and gathers; copies to the host, and sums over shards.
  for (const auto& traffic : {Traffic{5, 4, 3, 2, 4}, {60, 30, 15, 70, 40}, {15, 30, 60, 20, 70}}) {
    for (const auto& way : kWays) {
      SCOPED_TRACE(c10::str(
          way.name, ", gather ", traffic.gather, ", scatter ", traffic.scatter, ", all-reduce ", traffic.all_reduce));
      const auto times = measure(traffic, way);
      const auto gather = traffic.gather + (way.offloads ? traffic.from_host : 0);
      const auto all_reduce = way.all_reduces ? traffic.all_reduce : 0;
      EXPECT_EQ(times.forward, least(kProduct, way.gathers_in_forward ? gather : 0, 0, 0));
      EXPECT_EQ(
          times.backward, least(
                              2 * kProduct, way.gathers_in_backward ? gather : 0, way.scatters ? traffic.scatter : 0,
                              all_reduce, way.offloads ? traffic.to_host : 0));
    }
  }
}

// Nobody compares the order of its collectives, and there are no other groups for sums: they begin where all ranks do
// alike.
TEST(LateOverlap, SumsHideOnAGroupWithoutAStoreToo) {
  auto way = kWays.front();
  way.wrap = [](Rank& rank, auto& model) {
    const auto own = rank.mesh().group(rank.mesh().axes().front().name);
    const auto given = c10::make_intrusive<c10d::ProcessGroup>(rank.rank(), rank.world_size());
    given->setBoundDeviceId(rank.device());
    given->setBackend(at::kPrivateUse1, own->getBackendType(), own->getBackend(at::kPrivateUse1));
    given->setDefaultBackend(own->getBackendType());
    given->setGroupName("given");
    shard(FullyShardOptions().mesh(Mesh::from_process_groups({"ranks"}, {given}, rank.device())), model);
  };
  const Traffic traffic{5, 4, 3, 2, 4};
  const auto times = measure(traffic, way);
  EXPECT_EQ(times.backward, least(2 * kProduct, traffic.gather, traffic.scatter, 0));
}

} // namespace shardwise::test::overlap
