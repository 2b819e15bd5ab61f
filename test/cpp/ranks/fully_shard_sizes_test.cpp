// Parameters of all kinds of sizes, dtypes and memory formats: small ones and large ones are moved in different ways.
#include "ranks/sharded_models.h"

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

struct SizesCase {
  torch::Dtype dtype;
  /// Of the difference to the whole. A piece in the wrong place differs by about 1.
  double tolerance;
};

/// A model beside a plain one.
struct Both {
  Rank& rank;
  SizesCase kind;
  Sizes model{kind.dtype};
  Sizes reference{kind.dtype};

  void assert_near(const torch::Tensor& ours, const torch::Tensor& theirs, const std::string& what) const {
    ASSERT_EQ(ours.sizes(), theirs.sizes()) << what;
    ASSERT_EQ(ours.dtype(), theirs.dtype()) << what;
    const auto size = theirs.to(torch::kDouble).norm().item<double>();
    const auto difference = (ours.to(torch::kDouble) - theirs.to(torch::kDouble)).norm().item<double>();
    ASSERT_LE(difference, kind.tolerance * std::max(size, 1e-6)) << what << ", of " << size;
  }
  /// Values and gradients are pieces of the plain model's, cut along this dimension or the last one.
  void check(const std::string& what, int64_t dim = 0) const {
    const auto whole = reference->named_parameters();
    for (const auto& entry : model->named_parameters()) {
      const auto& theirs = whole[entry.key()];
      const auto cut = std::min(dim, theirs.dim() - 1);
      const auto where = what + ": " + entry.key() + " on " + rank.name();
      assert_near(entry.value().detach(), piece_of(theirs.detach(), rank, cut), where);
      assert_near(entry.value().grad(), piece_of(theirs.grad(), rank, cut), "gradient of " + where);
    }
  }
  void train(const std::function<void(const std::string& what)>& after_backward, bool end_is_seen = false) {
    torch::optim::SGD mine(model->parameters(), 0.05), theirs(reference->parameters(), 0.05);
    for (int step = 0; step < 3; ++step) {
      const auto what = "step " + std::to_string(step);
      rank.step(what);
      const auto x = data(step, rank.rank(), kind.dtype);
      (end_is_seen ? call(*model, x) : model->forward(x)).mean().backward();
      reference_backward(rank, [&](int r) { return reference->forward(data(step, r, kind.dtype)).mean(); });
      after_backward(what);
      mine.step();
      theirs.step();
      mine.zero_grad();
      theirs.zero_grad();
    }
  }
};

const std::vector<SizesCase> kCases{
    {torch::kFloat32, 1e-5}, {torch::kFloat64, 1e-12}, {torch::kBFloat16, 0.3}, {torch::kFloat16, 0.05}};

TEST(FullyShardSizes, SmallAndLargeParametersOfEveryDtype) {
  for (const auto& kind : kCases) {
    for (const int64_t dim : {0, 1}) {
      run_ranks(3, [&](Rank& rank) {
        Both both{rank, kind};
        const auto placed = [dim](const std::string&, const torch::Tensor& parameter) -> std::optional<int64_t> {
          return std::min(dim, parameter.dim() - 1);
        };
        fully_shard(both.model->first, sharded_on(rank).shard_placement(placed));
        fully_shard(both.model, sharded_on(rank).shard_placement(placed));
        both.train([&](const std::string& what) { both.check(what, dim); });
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
    Both both{rank, {torch::kFloat32, 1e-5}};
    auto unit = fully_shard(both.model, sharded_on(rank));
    int calls = 0;
    both.train([&](const std::string& what) {
      both.check(what);
      if (what == "step 0") {
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
    Both both{rank, {torch::kFloat64, 1e-12}};
    fully_shard(both.model, sharded_on(rank).reshard_after_forward(2));
    both.train([&](const std::string& what) { both.check(what); }, /*end_is_seen=*/true);
  });
}

} // namespace
} // namespace shardwise::test
