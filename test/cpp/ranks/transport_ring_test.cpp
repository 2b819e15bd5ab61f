// All-reduces between hosts that have several ranks each: who sends how much to whom, and what comes out.
#include "ranks/models.h"
#include "ranks/transport_groups.h"
#include "support/form.h"

#include <numeric>

namespace shardwise::test {
namespace {

using Op = c10d::ReduceOp;

BackendPtr backend_on(Rank& rank, const std::vector<std::string>& hosts, const std::string& name) {
  return comm::make_direct(
      {.name = name,
       .store = c10::make_intrusive<c10d::PrefixStore>(name, rank.store()),
       .rank = rank.rank(),
       .size = rank.world_size(),
       .device = at::kCPU,
       .connect_timeout = std::chrono::seconds(60),
       .timeout = std::chrono::seconds(60),
       .host = hosts[rank.rank()]});
}

torch::Tensor values_of(int rank, int64_t elements, at::ScalarType dtype) {
  const auto values = torch::randn({elements}, generator(static_cast<uint64_t>(rank) + 1), torch::kDouble);
  return (at::isIntegralType(dtype, false) ? values.mul(1000).round() : values).to(dtype);
}

void expect_sum(Rank& rank, c10d::Backend& backend, int64_t elements, at::ScalarType dtype, Op::RedOpType op) {
  const auto ours = values_of(rank.rank(), elements, dtype);
  start_all_reduce(backend, ours, op)->wait();
  const bool is_half = dtype == torch::kBFloat16;
  auto expected = torch::zeros({elements}, is_half ? torch::kFloat : torch::kDouble);
  for (int r = 0; r < rank.world_size(); ++r) expected += values_of(r, elements, dtype);
  if (op == Op::AVG) expected /= rank.world_size();
  const auto text = c10::str(rank.name(), ", ", elements, " of ", dtype, op == Op::AVG ? ", mean" : "");
  if (is_half) {
    ASSERT_TRUE(torch::equal(ours, expected.to(dtype))) << text << ": rounded once";
  } else {
    ASSERT_TRUE(torch::allclose(ours.to(torch::kDouble), expected, 1e-5, 1e-5)) << text;
  }
  // Every rank has the same bits.
  auto all = torch::empty({rank.world_size(), elements}, dtype);
  start_all_gather(backend, all, ours)->wait();
  for (int r = 0; r < rank.world_size(); ++r) ASSERT_TRUE(torch::equal(all[r], ours)) << text << ", of rank " << r;
}

const std::vector<std::vector<std::string>> kHosts{
    {"a", "a", "b", "b"}, {"a", "b", "a", "b"}, {"b", "a", "a"}, {"c", "a", "a", "b", "a"}};

} // namespace

TEST(TransportRing, SumsAndMeans) {
  for (const auto& hosts : kHosts) {
    run_ranks(static_cast<int>(hosts.size()), [&](Rank& rank) {
      const auto backend = backend_on(rank, hosts, "sums");
      EXPECT_EQ(transport_name(*backend), "TCP");
      expect_sum(rank, *backend, 262144 + 5, torch::kFloat, Op::SUM);
      expect_sum(rank, *backend, by_form(300001, 1100003), torch::kFloat, Op::AVG);
      expect_sum(rank, *backend, 150001, torch::kDouble, Op::AVG);
      expect_sum(rank, *backend, 300001, torch::kInt, Op::SUM);
      expect_sum(rank, *backend, 550001, torch::kBFloat16, Op::SUM);
    });
  }
}

TEST(TransportRing, EachByteCrossesALinkTwice) {
  for (const auto& hosts : kHosts) {
    const auto world = static_cast<int>(hosts.size());
    std::vector<std::vector<uint64_t>> sent(world, std::vector<uint64_t>(world));
    constexpr int64_t kElements = 1048576;
    run_ranks(world, [&](Rank& rank) {
      const auto backend = backend_on(rank, hosts, "bytes");
      start_all_reduce(*backend, values_of(rank.rank(), kElements, torch::kFloat))->wait();
      const auto& direct = dynamic_cast<const transport::Backend&>(*backend);
      for (int peer = 0; peer < world; ++peer) sent[rank.rank()][peer] = direct.sent_to(peer);
    });
    const auto least = 2.0 * (world - 1) / world * kElements * sizeof(float);
    std::map<std::string, uint64_t> leaves;
    for (int rank = 0; rank < world; ++rank) {
      EXPECT_NEAR(std::accumulate(sent[rank].begin(), sent[rank].end(), 0.), least, 1000) << "rank " << rank;
      for (int peer = 0; peer < world; ++peer) {
        if (hosts[rank] != hosts[peer]) leaves[hosts[rank]] += sent[rank][peer];
      }
    }
    for (const auto& [host, bytes] : leaves) EXPECT_NEAR(static_cast<double>(bytes), least, 1000) << "host " << host;
  }
}

} // namespace shardwise::test
