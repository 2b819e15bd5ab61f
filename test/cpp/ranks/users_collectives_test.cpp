// A program's own collectives between those of units, on the process group that it gave or that the mesh shows (T40).
#include "ranks/delays.h"
#include "ranks/hybrid_models.h"
#include "transport_groups.h"

#include <torch/csrc/autograd/custom_function.h>

namespace shardwise::test {
namespace {

using torch::Tensor;
using Group = c10::intrusive_ptr<c10d::ProcessGroup>;

Tensor sum_over(const Group& group, const Tensor& tensor) {
  std::vector<Tensor> sums{tensor.detach().clone()};
  group->allreduce(sums)->wait();
  return sums[0];
}

/// Adds up over the ranks, forward and backward.
struct SumOverRanks : torch::autograd::Function<SumOverRanks> {
  static Tensor forward(torch::autograd::AutogradContext* context, const Tensor& x, const Group& group) {
    context->saved_data["group"] = group;
    return sum_over(group, x);
  }
  static torch::autograd::variable_list backward(
      torch::autograd::AutogradContext* context, const torch::autograd::variable_list& gradients) {
    return {sum_over(context->saved_data["group"].toCustomClass<c10d::ProcessGroup>(), gradients[0]), Tensor()};
  }
};

constexpr int64_t kFeatures = 6;

/// Three units; what ranks have is added up between them.
struct SummingImpl : torch::nn::Module {
  SummingImpl() {
    for (int i = 0; i < 3; ++i) layers->push_back(torch::nn::Linear(kFeatures, kFeatures));
    fill(*this);
  }
  Tensor forward(Tensor x, const std::function<Tensor(const Tensor&)>& sum) {
    for (size_t i = 0; i < layers->size(); ++i) {
      if (i > 0) x = sum(x);
      x = torch::tanh(layers[i]->as<torch::nn::Linear>()->forward(x));
    }
    return x;
  }
  torch::nn::ModuleList layers = register_module("layers", torch::nn::ModuleList());
};
TORCH_MODULE(Summing);

/// A process group of torch's own, as programs make it.
Group plain_gloo(Rank& rank, const std::string& name) {
  const auto spec = spec_of(rank, name);
  auto group = c10::make_intrusive<c10d::ProcessGroup>(spec.store, spec.rank, spec.size);
  group->setBackend(c10::DeviceType::CPU, c10d::ProcessGroup::BackendType::GLOO, comm::make_gloo(spec));
  return group;
}

/// What a step is of one process that has the data of all ranks: every rank's loss, which all have the sums in.
void reference_step(Summing& model, torch::optim::Optimizer& optimizer, int step, int world) {
  optimizer.zero_grad();
  std::vector<Tensor> inputs;
  for (int rank = 0; rank < world; ++rank) inputs.push_back(batch(step, rank, kFeatures));
  auto x = torch::stack(inputs);
  const auto sum = [&](const Tensor& parts) { return parts.sum(0, /*keepdim=*/true).expand_as(parts); };
  // Ranks' losses are averaged; the sum in backward is that of all of them.
  (model->forward(x, sum).pow(2).flatten(1).mean(1).sum() / world).backward();
  optimizer.step();
}

using Check = std::function<void(Summing& ours, Summing& reference, const std::string& what)>;

void train(
    Rank& rank, const std::vector<Group>& groups, const std::function<void(Summing&)>& wrap, const Check& check) {
  Summing ours, reference;
  wrap(ours);
  torch::optim::SGD mine(ours->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
  torch::optim::SGD theirs(reference->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
  const auto sum = [&](Tensor x) {
    for (const auto& group : groups) x = SumOverRanks::apply(x, group);
    return x;
  };
  for (int step = 0; step < 5; ++step) {
    mine.zero_grad();
    ours->forward(batch(step, rank.rank(), kFeatures), sum).pow(2).mean().backward();
    reference_step(reference, theirs, step, rank.world_size());
    mine.step();
    check(ours, reference, c10::str("step ", step));
  }
}

std::function<void(Summing&)> sharding(const FullyShardOptions& options) {
  return [=](Summing& model) {
    for (const auto& layer : *model->layers) fully_shard(*layer, options);
    fully_shard(model, options);
  };
}

Check pieces_on(Rank& rank, int64_t shards) {
  return [&rank, shards](Summing& ours, Summing& reference, const std::string& what) {
    assert_pieces(*ours, *reference, rank, what, {}, shards);
  };
}

void whole_values(Summing& ours, Summing& reference, const std::string& what) {
  assert_state(full_state_dict(ours), plain_state(*reference), what);
}

void train_in_all_modes(Rank& rank, const Mesh& mesh) {
  const std::vector groups{mesh.group(mesh.axes().front().name)};
  const auto options = FullyShardOptions().mesh(mesh);
  rank.step("rows");
  train(rank, groups, sharding(options), pieces_on(rank, mesh.size()));
  rank.step("flat");
  train(rank, groups, sharding(FullyShardOptions(options).layout(ShardLayout::flat)), whole_values);
  rank.step("replicate");
  const auto copies = [&](Summing& model) {
    for (const auto& layer : *model->layers) replicate(*layer, ReplicateOptions().mesh(mesh));
  };
  train(rank, groups, copies, pieces_on(rank, 1));
}

} // namespace

TEST(UsersCollectives, BetweenThoseOfUnitsInBackward) {
  const Delays late(std::nullopt);
  run_ranks(2, [](Rank& rank) {
    train_in_all_modes(rank, rank.mesh());
    const auto given = plain_gloo(rank, "given");
    train_in_all_modes(rank, Mesh::from_process_groups({"given"}, {given}, torch::kCPU));
  });
  EXPECT_GT(late.passed(), 100);
}

TEST(UsersCollectives, AlongBothAxes) {
  const Delays late(std::nullopt);
  run_ranks(4, [](Rank& rank) {
    const auto mesh = rank.mesh({{"replicate", 2}, {"shard", 2}});
    const std::vector groups{mesh.group("replicate"), mesh.group("shard")};
    train(rank, groups, sharding(FullyShardOptions().mesh(mesh)), pieces_on(rank, 2));
  });
}

} // namespace shardwise::test
