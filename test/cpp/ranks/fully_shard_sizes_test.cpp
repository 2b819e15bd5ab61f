// Parameters of all kinds of sizes, dtypes and memory formats: small ones and large ones are moved in different ways.
#include "ranks/fully_shard_models.h"

namespace shardwise::test {
namespace {

/// Parameters of more and of fewer than 32768 elements, whose gradients come in several memory formats.
struct SizesImpl : torch::nn::Module {
  explicit SizesImpl(torch::Dtype dtype) {
    fill(*this);
    to(dtype);
  }
  torch::Tensor forward(const torch::Tensor& x) {
    auto hidden = torch::tanh(first->forward(x));
    // The gradient of a transposed weight is transposed; that of an expanded one has no memory of its own.
    hidden = torch::tanh(hidden.matmul(large.t()) + hidden.matmul(small.t()).sum(1, true));
    return (hidden * row.expand({hidden.size(0), -1})).sum(1) + offset.expand({hidden.size(0)}) * 3;
  }
  torch::nn::Linear first = register_module("first", torch::nn::Linear(7, 190));
  torch::Tensor large = register_parameter("large", torch::empty({301, 190}));
  torch::Tensor small = register_parameter("small", torch::empty({5, 190}));
  torch::Tensor row = register_parameter("row", torch::empty({301}));
  torch::Tensor offset = register_parameter("offset", torch::empty({1}));
};
TORCH_MODULE(Sizes);

torch::Tensor data(int step, int rank, torch::Dtype dtype) {
  return batch(step, rank, 7).to(dtype);
}

/// The difference is small beside the whole. A piece in the wrong place differs by about 1.
void assert_near(const torch::Tensor& ours, const torch::Tensor& theirs, const std::string& what) {
  static const std::map<torch::Dtype, double> tolerances{
      {torch::kFloat32, 1e-5}, {torch::kFloat64, 1e-12}, {torch::kBFloat16, 0.3}, {torch::kFloat16, 0.05}};
  const torch::NoGradGuard no_grad;
  ASSERT_EQ(ours.sizes(), theirs.sizes()) << what;
  ASSERT_EQ(ours.dtype(), theirs.dtype()) << what;
  const auto size = theirs.to(torch::kDouble).norm().item<double>();
  const auto difference = (ours.to(torch::kDouble) - theirs.to(torch::kDouble)).norm().item<double>();
  ASSERT_LE(difference, tolerances.at(theirs.scalar_type()) * std::max(size, 1e-6)) << what << ", of " << size;
}

Pair<Sizes> of_dtype(Rank& rank, torch::Dtype dtype) {
  return pair(rank, Sizes(dtype), Sizes(dtype));
}

void train(Pair<Sizes>& both, const std::function<void(int step)>& after_backward = {}, bool end_is_seen = false) {
  for (int step = 0; step < 3; ++step) {
    const auto what = c10::str("step ", step);
    both.rank.step(what);
    const auto loss = [&](Sizes& model, int number, int r) {
      const auto x = data(number, r, both.reference->large.scalar_type());
      return (end_is_seen ? call(model, x) : model->forward(x)).mean();
    };
    both.backward(loss, step);
    assert_pieces(*both.ours, *both.reference, both.rank, what, both.dims, 0, assert_near);
    if (after_backward) after_backward(step);
    both.each([](Sizes& model) { descend(*model, 0.05); });
  }
}

TEST(FullyShardSizes, SmallAndLargeParametersOfEveryDtype) {
  for (const auto dtype : {torch::kFloat32, torch::kFloat64, torch::kBFloat16, torch::kFloat16}) {
    for (const int64_t dim : {0, 1}) {
      run_ranks(3, [&](Rank& rank) {
        auto both = of_dtype(rank, dtype);
        const auto placed = [dim](const std::string&, const torch::Tensor& parameter) -> std::optional<int64_t> {
          return std::min(dim, parameter.dim() - 1);
        };
        for (const auto& entry : both.reference->named_parameters())
          both.dims[entry.key()] = *placed("", entry.value());
        fully_shard(both.ours->first, sharded_on(rank).shard_placement(placed));
        fully_shard(both.ours, sharded_on(rank).shard_placement(placed));
        train(both);
      });
    }
  }
}

/// 301 rows of 190: on two ranks large enough to go where they belong at once.
int64_t bytes_copied_out(Rank& rank, const Mesh& mesh, const FullyShardOptions& options) {
  Sizes model(torch::kFloat32);
  const auto unit = fully_shard(model, FullyShardOptions(options).mesh(mesh));
  const auto before = unit.counters().unsharded_bytes;
  model->forward(data(0, rank.rank(), torch::kFloat32)).mean().backward();
  return unit.counters().unsharded_bytes - before;
}

TEST(FullyShardSizes, LargePiecesAreNotCopiedOut) {
  run_ranks(2, [&](Rank& rank) {
    const int64_t small = 4 * (7 * 190 + 190 + 5 * 190 + 301 + 1);
    const int64_t large = 4 * 301 * 190;
    const auto mesh = [&](Transport transport) {
      const auto place = transport == Transport::gloo ? "gloo" : "direct";
      return Mesh({{"world", 2}}, rank.mesh_options(place).device(at::kCPU).transport(transport));
    };
    const auto direct = mesh(Transport::direct);
    ASSERT_EQ(bytes_copied_out(rank, direct, {}), small);
    ASSERT_EQ(bytes_copied_out(rank, mesh(Transport::gloo), {}), small + large);
    // A piece of columns lies in many places.
    ASSERT_EQ(bytes_copied_out(rank, direct, FullyShardOptions().shard_placement(last_dimension)), small + large);
  });
}

// It fills one tensor, out of which everything is copied: the moves of the gathers before are not its own.
TEST(FullyShardSizes, ACustomGatherInBetween) {
  run_ranks(2, [](Rank& rank) {
    auto both = of_dtype(rank, torch::kFloat32);
    auto unit = fully_shard(both.ours, sharded_on(rank));
    int calls = 0;
    train(both, [&](int step) {
      if (step == 0) {
        unit.set_custom_all_gather([&calls](at::Tensor& output, at::Tensor& input, c10d::ProcessGroup& group) {
          ++calls;
          return group._allgather_base(output, input);
        });
      } else {
        unit.set_custom_all_gather({});
      }
    });
    ASSERT_EQ(calls, 1);
  });
}

// What neighbours hold together is cut out of what was gathered, so that all of it has to be there.
TEST(FullyShardSizes, LargeOnesThatNeighboursHold) {
  run_ranks(4, [](Rank& rank) {
    // In double precision the pieces of 4 ranks are large enough.
    auto both = of_dtype(rank, torch::kFloat64);
    fully_shard(both.ours, sharded_on(rank).reshard_after_forward(2));
    train(both, {}, /*end_is_seen=*/true);
  });
}

} // namespace
} // namespace shardwise::test
