// Works of the direct transport: many under way, of several kinds and groups, waited for or not.
#include "support/expect.h"
#include "support/ranks.h"
#include "transport/tcp/connections.h"
#include "transport/transport.h"
#include "transport_groups.h"

#include <random>
#include <thread>

namespace shardwise::test {
namespace {

using namespace std::chrono_literals;

/// A collective of a random kind and size, and what it must give.
struct Issued {
  WorkPtr work;
  at::Tensor result;
  at::Tensor expected;
};

Issued issue(Rank& rank, c10d::Backend& backend, std::mt19937& random) {
  const auto world = rank.world_size();
  const std::vector<int64_t> sizes{1, 13, 700, 5000, 90001};
  const auto elements = sizes[random() % sizes.size()];
  const auto base = static_cast<double>(random() % 100);
  const auto mine = torch::full({elements}, base + rank.rank());
  const auto sum = base * world + world * (world - 1) / 2.;
  Issued issued;
  switch (random() % 5) {
    case 0:
      issued.result = mine;
      issued.expected = torch::full({elements}, sum);
      issued.work = start_all_reduce(backend, mine);
      break;
    case 1:
      issued.result = torch::zeros({world * elements});
      issued.expected = (torch::arange(world) + base).repeat_interleave(elements).to(at::kFloat);
      issued.work = start_all_gather(backend, issued.result, mine);
      break;
    case 2:
      issued.result = torch::zeros({elements});
      issued.expected = torch::full({elements}, sum);
      issued.work = start_reduce_scatter(backend, issued.result, mine.repeat({world}));
      break;
    case 3: {
      // Gloo's own, in between.
      std::vector<at::Tensor> tensors{mine};
      c10d::BroadcastOptions options;
      options.rootRank = world - 1;
      issued.result = mine;
      issued.expected = torch::full({elements}, base + world - 1);
      issued.work = backend.broadcast(tensors, options);
      break;
    }
    default:
      issued.result = mine;
      issued.expected = torch::full({elements}, base + world - 1);
      issued.work = start_all_reduce(backend, mine, c10d::ReduceOp::MAX);
  }
  return issued;
}

void expect_right(const Issued& issued, const Rank& rank, int number) {
  EXPECT_TRUE(torch::equal(issued.result, issued.expected)) << rank.name() << ", collective " << number;
}

TRANSPORT_TEST(ManyOfAllKindsUnderWay) {
  for (const int world : {2, 4}) {
    run_with_backends(world, [](Rank& rank, c10d::Backend& backend) {
      std::mt19937 random(7);
      std::mt19937 own(rank.rank());
      std::vector<Issued> under_way;
      for (int number = 0; number < 200; ++number) {
        under_way.push_back(issue(rank, backend, random));
        // Ranks come and wait at different times.
        if (own() % 40 == 0) std::this_thread::sleep_for(3ms);
        if (own() % 10 == 0) under_way.back().work->wait();
      }
      EXPECT_EQ(backend.getSequenceNumberForGroup(), 200);
      std::shuffle(under_way.begin(), under_way.end(), own);
      for (size_t i = 0; i < under_way.size(); ++i) {
        EXPECT_TRUE(under_way[i].work->wait(60s));
        EXPECT_TRUE(under_way[i].work->isCompleted() && under_way[i].work->isSuccess());
        expect_right(under_way[i], rank, static_cast<int>(i));
      }
    });
  }
}

// T02: each group has an order of its own, and ranks may mix them as they like.
TRANSPORT_TEST(TwoGroupsInOrdersOfTheirOwn) {
  run_ranks(3, [](Rank& rank) {
    const std::vector<BackendPtr> groups{make_backend(rank, "one"), make_backend(rank, "two")};
    std::vector<std::mt19937> random{std::mt19937(1), std::mt19937(2)};
    std::mt19937 own(rank.rank());
    std::vector<Issued> under_way;
    std::vector<int> issued{0, 0};
    while (issued[0] + issued[1] < 80) {
      const auto group = issued[0] == 40 ? 1 : issued[1] == 40 ? 0 : own() % 2;
      under_way.push_back(issue(rank, *groups[group], random[group]));
      ++issued[group];
    }
    for (size_t i = 0; i < under_way.size(); ++i) {
      under_way[i].work->wait();
      expect_right(under_way[i], rank, static_cast<int>(i));
    }
  });
}

TRANSPORT_TEST(WorksThatNobodyWaitsFor) {
  run_with_backends(2, [](Rank& rank, c10d::Backend& backend) {
    const auto tensor = torch::ones({100000});
    for (int i = 0; i < 10; ++i) start_all_reduce(backend, tensor);
    // The memory of these goes only with the transport's own hold on it.
    for (int i = 0; i < 10; ++i) start_all_reduce(backend, torch::ones({50000}));
    c10d::BarrierOptions options;
    backend.barrier(options)->wait();
    EXPECT_TRUE((tensor == 1024).all().item<bool>()) << rank.name();
  });
}

TRANSPORT_TEST(FuturesResultsAndTimeoutsOfWait) {
  run_with_backends(2, [](Rank& rank, c10d::Backend& backend) {
    const auto tensor = torch::full({20000}, rank.rank() + 1.);
    if (rank.rank() == 1) rank.store()->wait({"tried"});
    const auto work = start_all_reduce(backend, tensor);
    if (rank.rank() == 0) {
      EXPECT_FALSE(work->isCompleted());
      EXPECT_THROW(work->result(), std::exception);
      // Only this wait ends: the collective goes on.
      EXPECT_THROW(work->wait(30ms), std::exception);
      rank.store()->set("tried", "1");
    }
    // It needs nothing of the thread that issued it.
    const auto future = work->getFuture();
    future->wait();
    EXPECT_TRUE(future->value().toTensorVector()[0].is_same(tensor)) << rank.name();
    work->wait();
    EXPECT_TRUE(work->result()[0].is_same(tensor)) << rank.name();
    EXPECT_TRUE((tensor == 3).all().item<bool>()) << rank.name();
  });
}

TRANSPORT_TEST(ListsAndSeveralAtOnce) {
  run_with_backends(3, [](Rank& rank, c10d::Backend& backend) {
    for (const int64_t elements : {7, 30000}) {
      const auto mine = torch::full({elements}, rank.rank() + 1);
      std::vector<std::vector<at::Tensor>> lists{{}};
      for (int k = 0; k < 3; ++k) lists[0].push_back(torch::zeros({elements}, at::kLong));
      std::vector<at::Tensor> inputs{mine};
      backend.allgather(lists, inputs)->wait();
      for (int k = 0; k < 3; ++k) EXPECT_TRUE((lists[0][k] == k + 1).all().item<bool>()) << rank.name();
      std::vector<at::Tensor> outputs{torch::zeros({elements}, at::kLong)};
      backend.reduce_scatter(outputs, lists)->wait();
      EXPECT_TRUE((outputs[0] == 3 * (rank.rank() + 1)).all().item<bool>()) << rank.name();

      std::vector<at::Tensor> wholes{torch::zeros({3 * elements}, at::kLong), torch::zeros({3}, at::kLong)};
      std::vector<at::Tensor> parts{mine, torch::tensor({rank.rank() + 5}, at::kLong)};
      backend.allgather_into_tensor_coalesced(wholes, parts)->wait();
      EXPECT_EQ(wholes[0].sum().item<int64_t>(), 6 * elements) << rank.name();
      EXPECT_TRUE(torch::equal(wholes[1], torch::arange(5, 8))) << rank.name();
      backend.reduce_scatter_tensor_coalesced(parts, wholes)->wait();
      EXPECT_TRUE((parts[0] == 3 * (rank.rank() + 1)).all().item<bool>()) << rank.name();
      EXPECT_EQ(parts[1].item<int64_t>(), 3 * (rank.rank() + 5)) << rank.name();
      std::vector<at::Tensor> both{torch::ones({elements}), torch::ones({2}, at::kLong)};
      backend.allreduce_coalesced(both)->wait();
      EXPECT_TRUE((both[0] == 3).all().item<bool>() && (both[1] == 3).all().item<bool>()) << rank.name();
    }
  });
}

// T19: messages of users meet neither the transport's nor each other, whatever else is under way.
TRANSPORT_TEST(MessagesOfUsers) {
  run_with_backends(2, [](Rank& rank, c10d::Backend& backend) {
    const auto large = torch::ones({300000});
    const auto work = start_all_reduce(backend, large);
    for (const int tag : {0, 1, transport::kFirstTag - 1}) {
      std::vector<at::Tensor> out{torch::full({3}, 10. * rank.rank() + tag)};
      std::vector<at::Tensor> in{torch::zeros({3})};
      const auto sent = backend.send(out, 1 - rank.rank(), tag);
      backend.recv(in, 1 - rank.rank(), tag)->wait();
      sent->wait();
      EXPECT_TRUE((in[0] == static_cast<float>(10. * (1 - rank.rank()) + tag)).all().item<bool>()) << rank.name();
    }
    work->wait();
    EXPECT_TRUE((large == 2).all().item<bool>()) << rank.name();
    std::vector<at::Tensor> tensors{torch::zeros({3})};
    const auto send = [&] { backend.send(tensors, 1 - rank.rank(), transport::kFirstTag); };
    expect_error<c10::ValueError>(send, {"0 to 1073741823", "receive is 1073741824"});
  });
}

TRANSPORT_TEST(AMonitoredBarrierNamesWhoIsMissing) {
  run_with_backends(3, [](Rank& rank, c10d::Backend& backend) {
    const auto large = torch::ones({300000});
    const auto work = start_all_reduce(backend, large);
    c10d::BarrierOptions options;
    backend.monitoredBarrier(options, true);
    EXPECT_TRUE(work->isCompleted() && (large == 3).all().item<bool>()) << rank.name();
    if (rank.rank() == 2) return rank.store()->wait({"named"});
    options.timeout = 300ms;
    try {
      backend.monitoredBarrier(options, false);
      if (rank.rank() == 0) ADD_FAILURE() << "no error";
    } catch (const std::exception& error) {
      if (rank.rank() == 0) expect_text(error.what(), {"Rank 2 failed to pass monitoredBarrier"});
    }
    if (rank.rank() == 0) rank.store()->set("named", "1");
  });
}

constexpr int64_t kPart = 50000;
constexpr size_t kItem = sizeof(float);
using Ranges = std::vector<transport::DirectPlacement::Range>;

at::Tensor part_of(int rank) {
  return torch::arange(kPart, at::kFloat) + 100000. * rank;
}

/// In the elements of the result and of the memory.
transport::DirectPlacement::Range range(int64_t offset, int64_t elements, int64_t to) {
  return {static_cast<size_t>(offset) * kItem, static_cast<size_t>(elements) * kItem, static_cast<size_t>(to) * kItem};
}

WorkPtr start(
    c10d::Backend& backend, const at::Tensor& output, const at::Tensor& input, const at::Tensor& memory,
    const Ranges& ranges) {
  const transport::DirectPlacement landing{memory, ranges};
  const transport::DirectPlacementScope scope(&landing);
  return start_all_gather(backend, output, input);
}

} // namespace

// A range at the beginning of a part, two in the middle, none, and a whole part; their places in another order.
TRANSPORT_TEST(RangesOfAnAllGatherLandWhereTheyBelong) {
  const Ranges ranges{
      range(0, 20000, 90000), range(kPart + 3, 17000, 0), range(kPart + 30000, 16999, 17000),
      range(3 * kPart, kPart, 40000)};
  run_with_backends(4, [&](Rank& rank, c10d::Backend& backend) {
    for (const bool in_place : {false, true}) {
      const auto own = part_of(rank.rank());
      const auto input = in_place ? shared(own) : own;
      const auto output = torch::full({4 * kPart - 20000 - 17000 - 16999 - kPart}, -1.);
      const auto memory = torch::full({120000}, -1.);
      start(backend, output, input, memory, ranges)->wait();
      const auto whole = torch::cat({part_of(0), part_of(1), part_of(2), part_of(3)});
      auto landed = torch::full({120000}, -1.);
      const auto is_left = torch::ones({4 * kPart}, at::kBool);
      for (const auto& [offset, bytes, to] : ranges) {
        const auto from = static_cast<int64_t>(offset / kItem);
        const auto length = static_cast<int64_t>(bytes / kItem);
        landed.narrow(0, static_cast<int64_t>(to / kItem), length).copy_(whole.narrow(0, from, length));
        is_left.narrow(0, from, length).fill_(false);
      }
      EXPECT_TRUE(output.equal(whole.masked_select(is_left))) << rank.name();
      EXPECT_TRUE(memory.equal(landed)) << rank.name();
    }
    // It was for that gather alone.
    const auto output = torch::zeros({4 * kPart});
    start_all_gather(backend, output, part_of(rank.rank()))->wait();
    EXPECT_TRUE(output.equal(torch::cat({part_of(0), part_of(1), part_of(2), part_of(3)})));
  });
}

TRANSPORT_TEST(AnOutputThatDoesNotFitWhatIsLeftIsRefused) {
  run_with_backends(2, [](Rank& rank, c10d::Backend& backend) {
    const auto memory = torch::zeros({kPart});
    const auto input = part_of(rank.rank());
    for (const auto& output : {torch::zeros({2 * kPart}), torch::zeros({2 * kPart - 20000}, at::kInt)}) {
      expect_error<c10::ValueError>(
          [&] { start(backend, output, input, memory, {range(5, 20000, 0)}); }, {"exactly what has no place"});
    }
  });
}

TRANSPORT_TEST(RanksWhoseGathersLandOtherwiseAreTold) {
  run_with_backends(3, [](Rank& rank, c10d::Backend& backend) {
    const auto output = torch::zeros({3 * kPart});
    const auto memory = torch::zeros({kPart});
    const auto input = part_of(rank.rank());
    const auto left = output.narrow(0, 0, output.numel() - 20000);
    const auto work = rank.rank() == 1 ? start_all_gather(backend, output, input)
                                       : start(backend, left, input, memory, {range(5, 20000, 0)});
    expect_error<c10::DistBackendError>(
        [&] { work->wait(); }, {"an all-gather of 50000 elements of Float in 5 pieces", "Nothing was sent"});
    start_all_gather(backend, output, input)->wait();
    EXPECT_TRUE(output.equal(torch::cat({part_of(0), part_of(1), part_of(2)})));
  });
}

} // namespace shardwise::test
