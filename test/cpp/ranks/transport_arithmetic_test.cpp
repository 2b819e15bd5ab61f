// Collectives of both transports against sums in double precision; of ours against sums in the order of the ranks, bit
// by bit. R01, R04, R07, R08.
#include "support/form.h"
#include "support/ranks.h"
#include "transport/same_host/step_barrier.h"
#include "transport/tuning.h"
#include "transport_groups.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

namespace shardwise::test {
namespace {

using c10d::ReduceOp;

struct Dtype {
  at::ScalarType type;
  /// Relative error of one rounding.
  double rounding;
};

const std::vector<Dtype> kDtypes{{at::kDouble, 1e-16}, {at::kFloat, 6e-8}, {at::kHalf, 5e-4}, {at::kBFloat16, 4e-3},
                                 {at::kLong, 0},       {at::kInt, 0},      {at::kByte, 0},    {at::kChar, 0}};

bool exact(const Dtype& dtype) {
  return dtype.rounding == 0;
}

/// The same whoever asks; small integers for integer types.
at::Tensor values(int rank, int64_t elements, const Dtype& dtype, uint64_t seed) {
  const auto random = at::make_generator<at::CPUGeneratorImpl>(seed * 100 + static_cast<uint64_t>(rank));
  if (exact(dtype)) return torch::randint(0, 15, {elements}, random, at::kLong).to(dtype.type);
  return torch::randn({elements}, random, torch::TensorOptions(at::kFloat)).to(dtype.type);
}

struct Case {
  int64_t elements = 0;
  Dtype dtype;
  ReduceOp::RedOpType op = ReduceOp::SUM;
  uint64_t seed = 0;

  std::string name(const Rank& rank) const {
    return c10::str(rank.name(), ": ", elements, " of ", c10::toString(dtype.type), ", op ", static_cast<int>(op));
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
  const bool wide = c.dtype.type == at::kHalf || c.dtype.type == at::kBFloat16;
  auto sum = wide ? inputs[0].to(at::kFloat) : inputs[0].clone();
  for (size_t k = 1; k < inputs.size(); ++k) sum += wide ? inputs[k].to(at::kFloat) : inputs[k];
  if (c.op == ReduceOp::AVG) sum /= static_cast<double>(inputs.size());
  return sum.to(c.dtype.type);
}

/// Against double precision; a transport that rounds after each term may err by one rounding a term.
void expect_near(const at::Tensor& got, const std::vector<at::Tensor>& inputs, const Case& c, const Rank& rank) {
  auto sum = torch::zeros({c.elements}, at::kDouble);
  auto sizes = torch::zeros({c.elements}, at::kDouble);
  for (const auto& input : inputs) {
    sum += input.to(at::kDouble);
    sizes += input.to(at::kDouble).abs();
  }
  const auto count = static_cast<double>(inputs.size());
  if (c.op == ReduceOp::AVG) {
    sum /= count;
    sizes /= count;
  }
  const auto bound = sizes * (c.dtype.rounding * (count + 1)) + (exact(c.dtype) ? 0 : 1e-7);
  const auto begin = got.numel() == c.elements ? 0 : c.elements / rank.world_size() * rank.rank();
  const auto error = (got.to(at::kDouble) - sum.narrow(0, begin, got.numel())).abs();
  EXPECT_TRUE((error <= bound.narrow(0, begin, got.numel())).all().item<bool>()) << c.name(rank);
}

/// Every other case has its tensors where the ranks can read them, if they do that at all.
at::Tensor placed(const at::Tensor& tensor, const Case& c) {
  return c.seed % 2 == 0 ? shared(tensor) : tensor;
}

void check_reductions(Rank& rank, c10d::Backend& backend, Transport transport, const Case& whole) {
  auto c = whole;
  const auto world = rank.world_size();
  auto inputs = inputs_of(rank, c);
  // Not at the beginning of their storage.
  auto storage = placed(torch::cat({torch::zeros({3}, c.dtype.type), inputs[rank.rank()]}), c);
  const auto reduced = storage.narrow(0, 3, c.elements);
  start_all_reduce(backend, reduced, c.op)->wait();
  const bool is_ordered = transport == Transport::direct;
  if (is_ordered) {
    EXPECT_TRUE(torch::equal(reduced, ordered_sum(inputs, c))) << c.name(rank);
  }
  // What is the same on all ranks need not be near on more than one.
  if (!is_ordered || rank.rank() == 0) expect_near(reduced, inputs, c, rank);
  EXPECT_EQ(storage.narrow(0, 0, 3).to(at::kLong).sum().item<int64_t>(), 0) << c.name(rank);

  c.elements = (c.elements + world - 1) / world * world;
  inputs = inputs_of(rank, c);
  const auto input = placed(inputs[rank.rank()], c);
  const auto kept = input.clone();
  const auto part = torch::empty({c.elements / world}, c.dtype.type);
  start_reduce_scatter(backend, part, input, c.op)->wait();
  EXPECT_TRUE(torch::equal(input, kept)) << c.name(rank);
  if (!is_ordered) return expect_near(part, inputs, c, rank);
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
  // More than two stages.
  if (world == 2 && type == at::kFloat && through_shared_memory())
    sizes.push_back(static_cast<int64_t>(transport::same_host::ControlBlock::kStage) / item * 5 + 3);
  return sizes;
}

void check_everything(Rank& rank, Transport transport, const std::vector<Dtype>& dtypes) {
  const auto backend = make_backend(rank, "arithmetic", transport);
  uint64_t seed = 0;
  for (const auto& dtype : dtypes) {
    for (const auto elements : sizes_of(dtype.type, rank.world_size())) {
      // Gloo refuses empty tensors.
      if (transport == Transport::gloo && elements == 0) continue;
      Case c{.elements = elements, .dtype = dtype, .op = ReduceOp::SUM, .seed = ++seed};
      check_reductions(rank, *backend, transport, c);
      check_gather(rank, *backend, c);
      ++seed;
      if (transport == Transport::direct && through_shared_memory()) {
        c.seed = seed;
        check_reductions(rank, *backend, transport, c);
        check_gather(rank, *backend, c);
      }
      c.op = ReduceOp::AVG;
      if (!exact(dtype)) check_reductions(rank, *backend, transport, c);
    }
  }
}

/// From two ranks on; of many the dtypes that differ in how they are summed.
void check_worlds(bool shared_memory) {
  through_shared_memory() = shared_memory;
  for (int world = 2; world <= by_form(3, 8); ++world) {
    run_ranks(world, [world](Rank& rank) {
      const std::vector<Dtype> few{kDtypes[1], kDtypes[3], kDtypes[5]};
      check_everything(rank, Transport::direct, world <= 4 ? kDtypes : few);
    });
  }
}

TEST(TransportArithmetic, Direct) {
  check_worlds(/*shared_memory=*/false);
}

TEST(TransportArithmetic, SharedMemory) {
  check_worlds(/*shared_memory=*/true);
}

TEST(TransportArithmetic, Gloo) {
  for (int world = 2; world <= by_form(3, 8); ++world) {
    run_ranks(world, [&](Rank& rank) { check_everything(rank, Transport::gloo, {kDtypes[world % 4], kDtypes[5]}); });
  }
}

// R07: 64 MB, of three ranks in 16 bits too.
TRANSPORT_TEST(LargeReductions) {
  for (const int world : by_form<std::vector<int>>({2, 3}, {2, 3, 4})) {
    for (const auto& dtype : {kDtypes[1], kDtypes[3]}) {
      if (world != 3 && dtype.type != at::kFloat) continue;
      run_ranks(world, [&](Rank& rank) {
        const auto backend = make_backend(rank, "large");
        const auto elements = (int64_t{64} << 20) / static_cast<int64_t>(c10::elementSize(dtype.type)) / world;
        const auto unit = torch::arange(elements * world, at::kInt).remainder(7).to(dtype.type);
        const auto tensor = unit * (rank.rank() + 1);
        const int sum = world * (world + 1) / 2;
        start_all_reduce(*backend, tensor)->wait();
        EXPECT_TRUE(torch::equal(tensor, unit * sum)) << rank.name();
        const auto part = torch::empty({elements}, dtype.type);
        start_reduce_scatter(*backend, part, tensor)->wait();
        const auto twice = unit * (sum * world);
        EXPECT_TRUE(torch::equal(part, twice.chunk(world)[rank.rank()])) << rank.name();
        const auto all = torch::empty_like(tensor);
        start_all_gather(*backend, all, part)->wait();
        EXPECT_TRUE(torch::equal(all, twice)) << rank.name();
      });
    }
  }
}

// R08: the mean of what would overflow as a sum; sums of what is too small for 16 bits by itself.
TRANSPORT_TEST(SixteenBitsAreSummedInFloat) {
  for (const int world : {2, 4}) {
    run_ranks(world, [world](Rank& rank) {
      const auto backend = make_backend(rank, "range");
      for (const int64_t elements : {5, 30000, 100000}) {
        const auto large = torch::full({elements}, 60000., at::kHalf);
        start_all_reduce(*backend, large, ReduceOp::AVG)->wait();
        EXPECT_TRUE((large == 60000).all().item<bool>()) << rank.name();
        // 256 + 1 + 1 + 1 is 256 when each sum is rounded.
        const auto bits = torch::full({elements}, rank.rank() == 0 ? 256. : 1., at::kBFloat16);
        start_all_reduce(*backend, bits)->wait();
        EXPECT_TRUE(torch::equal(bits, torch::full({elements}, 255. + world, at::kBFloat16))) << rank.name();
        const auto tiny = torch::full({elements}, 6e-8, at::kHalf);
        const auto one = tiny[0].item<float>();
        start_all_reduce(*backend, tiny)->wait();
        EXPECT_TRUE((tiny.to(at::kFloat) == static_cast<float>(world) * one).all().item<bool>()) << rank.name();
      }
    });
  }
}

// Other operations and dtypes are Gloo's. R01.
TRANSPORT_TEST(OtherReductions) {
  run_ranks(3, [](Rank& rank) {
    const auto backend = make_backend(rank, "others");
    const auto mine = torch::arange(40, at::kFloat) * (rank.rank() + 1);
    const auto unit = torch::arange(40, at::kFloat);
    for (const auto& [op, expected] : std::vector<std::pair<ReduceOp::RedOpType, at::Tensor>>{
             {ReduceOp::MAX, unit * 3}, {ReduceOp::MIN, unit}, {ReduceOp::PRODUCT, unit.pow(3) * 6}}) {
      const auto tensor = mine.clone();
      start_all_reduce(*backend, tensor, op)->wait();
      EXPECT_TRUE(torch::allclose(tensor, expected)) << rank.name() << " op " << static_cast<int>(op);
    }
    const auto bits = torch::full({5}, int64_t{1} << rank.rank());
    start_all_reduce(*backend, bits, ReduceOp::BOR)->wait();
    EXPECT_TRUE((bits == 7).all().item<bool>()) << rank.name();
    const auto integers = torch::full({5}, 3);
    EXPECT_THROW(start_all_reduce(*backend, integers, ReduceOp::AVG)->wait(), std::exception) << rank.name();
  });
}

} // namespace
} // namespace shardwise::test
