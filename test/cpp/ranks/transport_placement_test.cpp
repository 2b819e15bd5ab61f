// All-gathers whose ranges go to memory of their own: see transport/transport.h.
#include "support/expect.h"
#include "support/ranks.h"
#include "transport/transport.h"
#include "transport_groups.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

namespace shardwise::test {
namespace {

constexpr int64_t kPart = 50000;
constexpr size_t kItem = sizeof(float);
using Ranges = std::vector<transport::DirectPlacement::Range>;

at::Tensor part_of(int rank) {
  return torch::arange(kPart, at::kFloat) + 100000. * rank;
}

/// In the elements of the output and of the memory.
transport::DirectPlacement::Range range(int64_t offset, int64_t elements, int64_t to) {
  return {static_cast<size_t>(offset) * kItem, static_cast<size_t>(elements) * kItem, static_cast<size_t>(to) * kItem};
}

WorkPtr start(
    c10d::Backend& backend, const at::Tensor& output, const at::Tensor& input, const at::Tensor& memory,
    const Ranges& ranges) {
  const transport::DirectPlacement placement{memory, ranges};
  const transport::DirectPlacementScope scope(&placement);
  return start_all_gather(backend, output, input);
}

} // namespace

// A range at the beginning of a part, two in the middle, none, and a whole part; their places in another order.
TRANSPORT_TEST(RangesOfAnAllGatherLandWhereTheyBelong) {
  const Ranges ranges{
      range(0, 20000, 90000), range(kPart + 3, 17000, 0), range(kPart + 30000, 16999, 17000),
      range(3 * kPart, kPart, 40000)};
  run_ranks(4, [&](Rank& rank) {
    const auto backend = make_backend(rank, "placement");
    for (const bool in_place : {false, true}) {
      const auto own = part_of(rank.rank());
      const auto input = in_place ? shared(own) : own;
      const auto output = torch::full({4 * kPart}, -1.);
      const auto memory = torch::full({120000}, -1.);
      start(*backend, output, input, memory, ranges)->wait();
      auto whole = torch::cat({part_of(0), part_of(1), part_of(2), part_of(3)});
      auto landed = torch::full({120000}, -1.);
      for (const auto& [offset, bytes, to] : ranges) {
        const auto from = static_cast<int64_t>(offset / kItem);
        const auto length = static_cast<int64_t>(bytes / kItem);
        landed.narrow(0, static_cast<int64_t>(to / kItem), length).copy_(whole.narrow(0, from, length));
        whole.narrow(0, from, length).fill_(-1);
      }
      EXPECT_TRUE(output.equal(whole)) << rank.name();
      EXPECT_TRUE(memory.equal(landed)) << rank.name();
    }
    // It was for that gather alone.
    const auto output = torch::zeros({4 * kPart});
    start_all_gather(*backend, output, part_of(rank.rank()))->wait();
    EXPECT_TRUE(output.equal(torch::cat({part_of(0), part_of(1), part_of(2), part_of(3)})));
  });
}

TRANSPORT_TEST(RanksWhoseGathersLandOtherwiseAreTold) {
  run_ranks(3, [](Rank& rank) {
    const auto backend = make_backend(rank, "otherwise");
    const auto output = torch::zeros({3 * kPart});
    const auto memory = torch::zeros({kPart});
    const auto input = part_of(rank.rank());
    const auto work = rank.rank() == 1 ? start_all_gather(*backend, output, input)
                                       : start(*backend, output, input, memory, {range(5, 20000, 0)});
    expect_error<c10::DistBackendError>(
        [&] { work->wait(); }, {"an all-gather of 50000 elements of Float in 5 pieces", "Nothing was sent"});
    start_all_gather(*backend, output, input)->wait();
    EXPECT_TRUE(output.equal(torch::cat({part_of(0), part_of(1), part_of(2)})));
  });
}

} // namespace shardwise::test
