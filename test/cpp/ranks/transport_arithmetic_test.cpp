// Collectives of the direct transport against sums in the order of the ranks, bit by bit. R01, R04, R07, R08.
#include "ranks/models.h"
#include "transport/tuning.h"
#include "transport_groups.h"

#include <numeric>

namespace shardwise::test {
namespace {

using c10d::ReduceOp;

const std::vector<at::ScalarType> kDtypes{at::kDouble, at::kFloat, at::kHalf, at::kBFloat16,
                                          at::kLong,   at::kInt,   at::kByte, at::kChar};
/// Those that differ in how they are summed.
const std::vector<at::ScalarType> kFewDtypes{at::kFloat, at::kBFloat16, at::kInt};

/// The same whoever asks; small integers for integer types.
at::Tensor values(int rank, int64_t elements, at::ScalarType dtype, uint64_t seed) {
  const auto random = at::make_generator<at::CPUGeneratorImpl>(seed * 100 + static_cast<uint64_t>(rank));
  if (at::isIntegralType(dtype, false)) return torch::randint(0, 15, {elements}, random, at::kLong).to(dtype);
  return torch::randn({elements}, random, torch::TensorOptions(at::kFloat)).to(dtype);
}

struct Case {
  int64_t elements = 0;
  at::ScalarType dtype = at::kFloat;
  ReduceOp::RedOpType op = ReduceOp::SUM;
  uint64_t seed = 0;

  std::string name(const Rank& rank) const {
    return c10::str(rank.name(), ": ", elements, " of ", c10::toString(dtype), ", op ", static_cast<int>(op));
  }
};

/// Of whole inputs, each as long as the case says.
std::vector<at::Tensor> inputs_of(const Rank& rank, const Case& c) {
  std::vector<at::Tensor> inputs;
  for (int k = 0; k < rank.world_size(); ++k) inputs.push_back(values(k, c.elements, c.dtype, c.seed));
  return inputs;
}

/// What a reduction must give: in the order of the ranks, 16-bit types in float.
at::Tensor ordered_sum(const std::vector<at::Tensor>& inputs, const Case& c) {
  const bool wide = c.dtype == at::kHalf || c.dtype == at::kBFloat16;
  auto sum = wide ? inputs[0].to(at::kFloat) : inputs[0].clone();
  for (size_t k = 1; k < inputs.size(); ++k) sum += wide ? inputs[k].to(at::kFloat) : inputs[k];
  if (c.op == ReduceOp::AVG) sum /= static_cast<double>(inputs.size());
  return sum.to(c.dtype);
}

/// Every other case has its tensors where the ranks can read them, if they do that at all.
at::Tensor placed(const at::Tensor& tensor, const Case& c) {
  return c.seed % 2 == 0 ? shared(tensor) : tensor;
}

void check_reductions(Rank& rank, c10d::Backend& backend, const Case& whole) {
  auto c = whole;
  const auto world = rank.world_size();
  auto inputs = inputs_of(rank, c);
  // Not at the beginning of their storage.
  auto storage = placed(torch::cat({torch::zeros({3}, c.dtype), inputs[rank.rank()]}), c);
  const auto reduced = storage.narrow(0, 3, c.elements);
  start_all_reduce(backend, reduced, c.op)->wait();
  EXPECT_TRUE(torch::equal(reduced, ordered_sum(inputs, c))) << c.name(rank);
  EXPECT_EQ(storage.narrow(0, 0, 3).to(at::kLong).sum().item<int64_t>(), 0) << c.name(rank);

  c.elements = (c.elements + world - 1) / world * world;
  inputs = inputs_of(rank, c);
  const auto input = placed(inputs[rank.rank()], c);
  const auto kept = input.clone();
  const auto part = torch::empty({c.elements / world}, c.dtype);
  start_reduce_scatter(backend, part, input, c.op)->wait();
  EXPECT_TRUE(torch::equal(input, kept)) << c.name(rank);
  const auto expected = ordered_sum(inputs, c).chunk(world)[rank.rank()];
  EXPECT_TRUE(torch::equal(part, expected)) << c.name(rank);
  // In place.
  const auto own = input.chunk(world)[rank.rank()];
  start_reduce_scatter(backend, own, input, c.op)->wait();
  EXPECT_TRUE(torch::equal(own, expected)) << c.name(rank);
}

void check_gather(Rank& rank, c10d::Backend& backend, const Case& c) {
  const auto inputs = inputs_of(rank, c);
  const auto expected = torch::cat(inputs);
  const auto output = torch::zeros_like(expected);
  start_all_gather(backend, output, placed(inputs[rank.rank()], c))->wait();
  EXPECT_TRUE(torch::equal(output, expected)) << c.name(rank);
  const auto place = placed(torch::zeros_like(expected), c);
  const auto own = place.narrow(0, rank.rank() * c.elements, c.elements);
  own.copy_(inputs[rank.rank()]);
  start_all_gather(backend, place, own)->wait();
  EXPECT_TRUE(torch::equal(place, expected)) << c.name(rank);
}

/// In elements: nothing, one, odd ones, and around the sizes at which the way changes.
std::vector<int64_t> sizes_of(at::ScalarType type, int world) {
  const auto item = static_cast<int64_t>(c10::elementSize(type));
  const auto small = static_cast<int64_t>(transport::kInline) / item;
  const auto piece = static_cast<int64_t>(transport::kLeastPiece) / item;
  std::vector<int64_t> sizes{0, 1, 37, small, small + 1, small * world, small * world + 1};
  const auto whole = static_cast<int64_t>(transport::kWholeAllReduce) / item;
  if (world == 2) sizes.insert(sizes.end(), {whole, whole + 1});
  // More pieces than are received ahead; of large worlds the data would be too much.
  if (world < 4) sizes.push_back(piece * world * 4 + 5);
  // The same of the largest pieces; through shared memory these are more than two stages.
  if (world == 2 && type == at::kFloat) {
    sizes.push_back(static_cast<int64_t>(transport::kLargestPiece) / item * world * 5 + 3);
  }
  return sizes;
}

void check_everything(Rank& rank, const std::vector<at::ScalarType>& dtypes) {
  const auto backend = make_backend(rank, "arithmetic");
  uint64_t seed = 0;
  for (const auto& dtype : dtypes) {
    for (const auto elements : sizes_of(dtype, rank.world_size())) {
      Case c{.elements = elements, .dtype = dtype, .op = ReduceOp::SUM, .seed = ++seed};
      check_reductions(rank, *backend, c);
      check_gather(rank, *backend, c);
      ++seed;
      if (through_shared_memory()) {
        c.seed = seed;
        check_reductions(rank, *backend, c);
        check_gather(rank, *backend, c);
      }
      c.op = ReduceOp::AVG;
      if (at::isFloatingType(dtype)) check_reductions(rank, *backend, c);
    }
  }
}

/// From two ranks on.
void check_worlds(bool shared_memory) {
  through_shared_memory() = shared_memory;
  for (int world = 2; world <= by_form(3, 8); ++world) {
    run_ranks(world, [world](Rank& rank) { check_everything(rank, world == 2 ? kDtypes : kFewDtypes); });
  }
}

TEST(TransportArithmetic, Direct) {
  check_worlds(/*shared_memory=*/false);
}

TEST(TransportArithmetic, SharedMemory) {
  check_worlds(/*shared_memory=*/true);
}

// R08: the mean of what would overflow as a sum; sums of what is too small for 16 bits by itself.
TRANSPORT_TEST(SixteenBitsAreSummedInFloat) {
  for (const int world : {2, 4}) {
    run_with_backends(world, [world](Rank& rank, c10d::Backend& backend) {
      for (const int64_t elements : {5, 30000, 100000}) {
        const auto large = torch::full({elements}, 60000., at::kHalf);
        start_all_reduce(backend, large, ReduceOp::AVG)->wait();
        EXPECT_TRUE((large == 60000).all().item<bool>()) << rank.name();
        // 256 + 1 + 1 + 1 is 256 when each sum is rounded.
        const auto bits = torch::full({elements}, rank.rank() == 0 ? 256. : 1., at::kBFloat16);
        start_all_reduce(backend, bits)->wait();
        EXPECT_TRUE(torch::equal(bits, torch::full({elements}, 255. + world, at::kBFloat16))) << rank.name();
        const auto tiny = torch::full({elements}, 6e-8, at::kHalf);
        const auto one = tiny[0].item<float>();
        start_all_reduce(backend, tiny)->wait();
        EXPECT_TRUE((tiny.to(at::kFloat) == static_cast<float>(world) * one).all().item<bool>()) << rank.name();
      }
    });
  }
}

// Other operations and dtypes are Gloo's. R01.
TRANSPORT_TEST(OtherReductions) {
  run_with_backends(3, [](Rank& rank, c10d::Backend& backend) {
    const auto mine = torch::arange(40, at::kFloat) * (rank.rank() + 1);
    const auto unit = torch::arange(40, at::kFloat);
    for (const auto& [op, expected] : std::vector<std::pair<ReduceOp::RedOpType, at::Tensor>>{
             {ReduceOp::MAX, unit * 3}, {ReduceOp::MIN, unit}, {ReduceOp::PRODUCT, unit.pow(3) * 6}}) {
      const auto tensor = mine.clone();
      start_all_reduce(backend, tensor, op)->wait();
      EXPECT_TRUE(torch::allclose(tensor, expected)) << rank.name() << " op " << static_cast<int>(op);
    }
    const auto bits = torch::full({5}, int64_t{1} << rank.rank());
    start_all_reduce(backend, bits, ReduceOp::BOR)->wait();
    EXPECT_TRUE((bits == 7).all().item<bool>()) << rank.name();
    const auto integers = torch::full({5}, 3);
    EXPECT_THROW(start_all_reduce(backend, integers, ReduceOp::AVG)->wait(), std::exception) << rank.name();
  });
}

BackendPtr backend_on(Rank& rank, const std::vector<std::string>& hosts, const std::string& name) {
  auto spec = spec_of(rank, name);
  spec.host = hosts[rank.rank()];
  return comm::make_direct(spec);
}

/// In an order of the ring's own, which is the same on all ranks.
void check_ring(Rank& rank, c10d::Backend& backend, const Case& c) {
  const auto inputs = inputs_of(rank, c);
  const auto ours = inputs[rank.rank()].clone();
  start_all_reduce(backend, ours, c.op)->wait();
  const auto expected = ordered_sum(inputs, c);
  if (c.dtype == torch::kBFloat16) {
    ASSERT_TRUE(torch::equal(ours, expected)) << c.name(rank) << ": rounded once";
  } else {
    ASSERT_TRUE(torch::allclose(ours, expected, 1e-5, 1e-5)) << c.name(rank);
  }
  auto all = torch::empty({rank.world_size(), c.elements}, c.dtype);
  start_all_gather(backend, all, ours)->wait();
  for (int r = 0; r < rank.world_size(); ++r) ASSERT_TRUE(torch::equal(all[r], ours)) << c.name(rank) << ", of " << r;
}

const std::vector<std::vector<std::string>> kHosts{
    {"a", "a", "b", "b"}, {"a", "b", "a", "b"}, {"b", "a", "a"}, {"c", "a", "a", "b", "a"}};

} // namespace

TEST(TransportRing, SumsAndMeans) {
  for (const auto& hosts : kHosts) {
    run_ranks(static_cast<int>(hosts.size()), [&](Rank& rank) {
      const auto backend = backend_on(rank, hosts, "sums");
      EXPECT_EQ(transport_name(*backend), "TCP");
      for (const auto& c : std::vector<Case>{
               {262144 + 5, torch::kFloat},
               {by_form(300001, 1100003), torch::kFloat, ReduceOp::AVG},
               {150001, torch::kDouble, ReduceOp::AVG},
               {300001, torch::kInt},
               {550001, torch::kBFloat16}}) {
        check_ring(rank, *backend, c);
      }
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
      start_all_reduce(*backend, values(rank.rank(), kElements, torch::kFloat, 0))->wait();
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
