// Parameters of one call on meshes of their own: experts, which differ between ranks.
#include "ranks/front_switches.h"
#include "ranks/fully_shard_models.h"

#include <limits>

namespace shardwise::test::parameter_mesh {
namespace {

constexpr int64_t kWidth = 6;
constexpr int64_t kExperts = 4;
constexpr int kWorld = 4;
/// Ranks beside each other hold different experts; those with the same ones shard them.
constexpr int64_t kHolders = 2;

using Group = c10::intrusive_ptr<c10d::ProcessGroup>;

torch::Tensor gathered(const torch::Tensor& rows, c10d::ProcessGroup& group) {
  auto all = torch::empty({group.getSize() * rows.size(0), rows.size(1)}, rows.options());
  auto mine = rows.contiguous();
  group._allgather_base(all, mine)->wait();
  return all;
}

torch::Tensor summed(const torch::Tensor& rows, c10d::ProcessGroup& group) {
  std::vector<at::Tensor> sum{rows.clone()};
  group.allreduce(sum)->wait();
  return sum.front().chunk(group.getSize())[group.getRank()];
}

/// The rows of all ranks of a group; backward adds up what they did with this rank's.
/// And this rank's rows of the sum over a group, the other way round.
template <auto Forward, auto Backward>
struct Exchange : torch::autograd::Function<Exchange<Forward, Backward>> {
  static torch::Tensor forward(
      torch::autograd::AutogradContext* context, const torch::Tensor& rows, const Group& group) {
    context->saved_data["group"] = group;
    return Forward(rows, *group);
  }
  static torch::autograd::variable_list backward(
      torch::autograd::AutogradContext* context, torch::autograd::variable_list gradients) {
    return {Backward(gradients[0], *context->saved_data["group"].toCustomClass<c10d::ProcessGroup>()), {}};
  }
};
using Rows = Exchange<gathered, summed>;
using Sum = Exchange<summed, gathered>;

/// Each row goes through all experts; their results are added with the weights of the gate.
struct ExpertsImpl : torch::nn::Module {
  torch::Tensor forward(const torch::Tensor& x, const torch::Tensor& weights) {
    if (!group) return through(x, weights);
    const auto all = Rows::apply(x, group);
    const auto mine = Rows::apply(weights, group).chunk(group->getSize(), 1)[group->getRank()];
    return Sum::apply(through(all, mine), group);
  }
  torch::Tensor through(const torch::Tensor& x, const torch::Tensor& weights) const {
    return (weights.t().unsqueeze(-1) * torch::matmul(torch::tanh(torch::matmul(x, up)), down)).sum(0);
  }
  torch::Tensor up = register_parameter("up", torch::zeros({kExperts, kWidth, 8}));
  torch::Tensor down = register_parameter("down", torch::zeros({kExperts, 8, kWidth}));
  Group group;
};
TORCH_MODULE(Experts);

struct LayerImpl : torch::nn::Module {
  /// `use`: whether this rank has rows for experts.
  torch::Tensor forward(const torch::Tensor& x, bool use) {
    const auto hidden = x + torch::tanh(dense->forward(x));
    if (!use) return hidden;
    const auto weights = gate->forward(hidden).softmax(-1);
    return hidden + experts->forward(hidden, weights);
  }
  torch::nn::Linear dense = register_module("dense", torch::nn::Linear(kWidth, kWidth));
  torch::nn::Linear gate =
      register_module("gate", torch::nn::Linear(torch::nn::LinearOptions(kWidth, kExperts).bias(false)));
  Experts experts = register_module("experts", Experts());
};
TORCH_MODULE(Layer);

struct SparseImpl : torch::nn::Module {
  SparseImpl() {
    fill(*this);
  }
  torch::Tensor forward(const torch::Tensor& x, bool use) {
    return out->forward(call(second, call(first, x, use), use));
  }
  torch::Tensor forward(const torch::Tensor& x) {
    return forward(x, true);
  }
  std::vector<Layer> layers() {
    return {first, second};
  }
  Layer first = register_module("first", Layer());
  Layer second = register_module("second", Layer());
  torch::nn::Linear out = register_module("out", torch::nn::Linear(kWidth, 3));
};
TORCH_MODULE(Sparse);

/// A rank's meshes, and which experts and which shards of them it holds.
struct Meshes {
  explicit Meshes(Rank& rank)
      : dense(rank.mesh()),
        both(rank.mesh({{"efsdp", kWorld / kHolders}, {"ep", kHolders}})),
        experts(Mesh::from_process_groups({"efsdp"}, {both.group("efsdp")}, rank.device())) {}
  Mesh dense;
  Mesh both;
  Mesh experts;
};

bool is_expert(const std::string& name) {
  return name.find("up") != std::string::npos || name.find("down") != std::string::npos;
}

/// This rank's experts, of all of them.
torch::Tensor own_experts(const torch::Tensor& all, const Meshes& on) {
  return all.chunk(kHolders)[on.both.coordinate("ep")];
}

/// Keeps this rank's experts. `exchange`: they get the rows of all ranks that hold others.
void spread(Sparse& model, const Meshes& on, bool exchange) {
  const torch::NoGradGuard guard;
  for (auto& layer : model->layers()) {
    for (auto& parameter : layer->experts->parameters()) parameter.set_data(own_experts(parameter, on).clone());
    if (exchange) layer->experts->group = on.both.group("ep");
  }
}

FullyShardOptions options_on(const Meshes& on) {
  return FullyShardOptions()
      .mesh(on.dense)
      .shard_placement([](const std::string& name, const torch::Tensor&) -> std::optional<int64_t> {
        return is_expert(name) ? 1 : 0;
      })
      .parameter_mesh([on](const std::string& name, const torch::Tensor&) -> std::optional<Mesh> {
        return is_expert(name) ? std::optional(on.experts) : std::nullopt;
      });
}

/// An expert's gradient comes from the rows of all ranks.
Unit wrap(Sparse& model, const FullyShardOptions& options) {
  for (auto& layer : model->layers()) fully_shard(layer, options).set_gradient_divide_factor(kWorld);
  return fully_shard(model, options);
}

/// Of the whole model on this rank: its own experts, and all of the rest.
StateDict whole_on_rank(const Sparse& reference, const Meshes& on) {
  StateDict whole;
  for (const auto& entry : reference->named_parameters()) {
    const auto value = entry.value().detach();
    whole.insert(entry.key(), is_expert(entry.key()) ? own_experts(value, on) : value);
  }
  return whole;
}

void check_whole(const Sparse& ours, const Sparse& reference, const Meshes& on) {
  const auto state = full_state_dict(*ours);
  for (const auto& item : whole_on_rank(reference, on)) assert_close(state[item.key()], item.value(), item.key());
}

void check(Sparse& ours, Sparse& reference, const Rank& rank, const Meshes& on, const std::string& what) {
  const auto expected = reference->named_parameters();
  for (const auto& entry : ours->named_parameters()) {
    const auto& whole = expected[entry.key()];
    const auto piece = [&](const torch::Tensor& tensor) {
      if (!is_expert(entry.key())) return piece_of(tensor, rank);
      return own_experts(tensor, on).chunk(kWorld / kHolders, 1)[on.both.coordinate("efsdp")];
    };
    const auto text = what + ": " + entry.key() + " on " + rank.name();
    assert_close(entry.value(), piece(whole.detach()), text);
    ASSERT_EQ(entry.value().grad().defined(), whole.grad().defined()) << text;
    if (whole.grad().defined()) assert_close(entry.value().grad(), piece(whole.grad()), "gradient of " + text);
  }
}

/// `has_rows`: the pieces are those of rows, and are compared after each step.
void train(Sparse& ours, Sparse& reference, const Rank& rank, const Meshes& on, bool has_rows = true) {
  for (int step = 0; step < 3; ++step) {
    // Of two microbatches.
    for (const int micro : {0, 1}) {
      unit(ours).set_requires_gradient_sync(micro == 1);
      const int number = 2 * step + micro;
      call(ours, batch(number, rank.rank(), kWidth)).pow(2).mean().backward();
      reference_backward(rank, [&](int r) { return reference->forward(batch(number, r, kWidth)).pow(2).mean(); });
    }
    if (has_rows) check(ours, reference, rank, on, "step " + std::to_string(step));
    for (auto* model : {&ours, &reference}) descend(**model, 0.1);
  }
}

} // namespace

TEST(FullyShardNDTraining, ShardPlacementFnTpEp) {
  using Reshard = std::optional<ReshardAfterForward>;
  for (const bool flat : {false, true}) {
    for (const auto& reshard : {Reshard(), Reshard(false), Reshard(2)}) {
      if (flat && reshard) continue;
      run_ranks(kWorld, [&](Rank& rank) {
        const Meshes on(rank);
        Sparse ours, reference;
        spread(ours, on, /*exchange=*/true);
        auto options = options_on(on).reshard_after_forward(reshard);
        if (flat) options.layout(ShardLayout::flat);
        wrap(ours, options);
        train(ours, reference, rank, on, !flat);
        check_whole(ours, reference, on);
      });
    }
  }
}

TEST(ParameterMesh, AnInfiniteGradientOfOneRanksExpertsSkipsTheStepOnAll) {
  run_ranks(kWorld, [](Rank& rank) {
    const Meshes on(rank);
    Sparse ours;
    spread(ours, on, /*exchange=*/true);
    wrap(ours, options_on(on));
    SGD optimizer(ours->parameters(), torch::optim::SGDOptions(0.1));
    GradScaler scaler;
    for (const bool is_infinite : {false, true, false}) {
      optimizer.zero_grad();
      scaler.scale(call(ours, batch(0, rank.rank(), kWidth)).pow(2).mean()).backward();
      if (is_infinite && rank.rank() == kWorld - 1) {
        ours->first->experts->parameters()[0].mutable_grad().fill_(std::numeric_limits<float>::infinity());
      }
      const auto before = full_state_dict(*ours)["out.weight"];
      scaler.step(optimizer);
      scaler.update();
      EXPECT_EQ(torch::equal(before, full_state_dict(*ours)["out.weight"]), is_infinite) << rank.name();
    }
  });
}

TEST(ParameterMesh, ARankWithoutRowsForItsExperts) {
  // Whatever a rank uses first, it gathers all that the call made, as every rank does.
  for (const auto& [touch, hooks] : {std::pair(true, true), std::pair(true, false), std::pair(false, true)}) {
    const auto switches = front_switches(touch, hooks);
    run_ranks(kWorld, [&, seen = !touch](Rank& rank) {
      const Meshes on(rank);
      Sparse ours;
      spread(ours, on, /*exchange=*/false);
      // Its reference has this rank's experts, and sees the rows of the ranks that share them.
      Sparse reference;
      spread(reference, on, /*exchange=*/false);
      for (auto* model : {&ours, &reference}) {
        for (auto& layer : (*model)->layers()) {
          layer->gate = layer->replace_module(
              "gate", torch::nn::Linear(torch::nn::LinearOptions(kWidth, kExperts / kHolders).bias(false)));
        }
        fill(*(*model)->out);
        for (auto& layer : (*model)->layers()) fill(*layer, 3);
      }
      auto options = options_on(on);
      for (auto& layer : ours->layers()) fully_shard(layer, options);
      fully_shard(ours, options);
      const auto uses = [](int step, int r) { return (step + r / kHolders) % 2 == 0; };
      for (int step = 0; step < 4; ++step) {
        rank.step("step " + std::to_string(step));
        const auto mine = batch(step, rank.rank(), kWidth);
        const bool use = uses(step, rank.rank());
        const auto out = seen ? call(ours, mine, use) : ours->forward(mine, use);
        out.pow(2).mean().backward();
        // The experts' mean, over those who share them.
        for (int r = rank.rank() % kHolders; r < kWorld; r += kHolders) {
          (reference->forward(batch(step, r, kWidth), uses(step, r)).pow(2).mean() / kHolders).backward();
        }
        for (const auto& entry : ours->named_parameters()) {
          if (!is_expert(entry.key())) continue;
          const auto whole = reference->named_parameters()[entry.key()].grad();
          const auto piece = whole.chunk(kWorld / kHolders, 1)[on.both.coordinate("efsdp")];
          assert_close(entry.value().grad(), piece, entry.key());
        }
        reference->zero_grad();
        ours->zero_grad();
      }
    });
  }
}

TEST(ParameterMesh, TheNormCountsEachExpertOnce) {
  for (const double order : {2.0, 1.0, std::numeric_limits<double>::infinity()}) {
    run_ranks(kWorld, [&](Rank& rank) {
      const Meshes on(rank);
      Sparse ours, reference;
      spread(ours, on, /*exchange=*/true);
      wrap(ours, options_on(on));
      call(ours, batch(0, rank.rank(), kWidth)).pow(2).mean().backward();
      reference_backward(rank, [&](int r) { return reference->forward(batch(0, r, kWidth)).pow(2).mean(); });
      const auto expected = torch::nn::utils::clip_grad_norm_(reference->parameters(), 0.5, order);
      const auto norm = clip_grad_norm_(ours, 0.5, order).item<double>();
      ASSERT_NEAR(norm, expected, 1e-5 * expected);
      check(ours, reference, rank, on, "clipped");
    });
  }
}

TEST(ParameterMesh, MixedPrecisionAndOffload) {
  run_ranks(kWorld, [](Rank& rank) {
    const Meshes on(rank);
    Sparse ours, plain;
    spread(ours, on, /*exchange=*/true);
    auto options =
        options_on(on).mixed_precision(MixedPrecision().param_dtype(torch::kBFloat16)).cpu_offload(CpuOffload());
    wrap(ours, options);
    for (int step = 0; step < 3; ++step) {
      // By a call that can be seen and by a direct one: inputs are cast, whatever the parameter's mesh.
      const auto x = batch(step, rank.rank(), kWidth);
      const auto out = step % 2 == 0 ? call(ours, x) : ours->forward(x);
      ASSERT_EQ(out.scalar_type(), torch::kBFloat16);
      out.pow(2).mean().backward();
      for (const auto& parameter : ours->parameters()) ASSERT_EQ(parameter.grad().scalar_type(), torch::kFloat);
      ours->zero_grad();
    }
    expect_error<ValueError>([&] { estimate_memory(plain, options_on(on), kWorld); }, {"parameter_mesh"});
  });
}

TEST(ParameterMesh, MadeOnTheMetaDeviceAndLoaded) {
  run_ranks(kWorld, [](Rank& rank) {
    const Meshes on(rank);
    Sparse reference;
    auto ours = on_meta([] { return Sparse(); });
    spread(ours, on, /*exchange=*/true);
    wrap(ours, options_on(on));
    to_empty(ours);
    load_full_state_dict(ours, whole_on_rank(reference, on), LoadStateDictOptions().broadcast_from_rank0(false));
    train(ours, reference, rank, on);
    for (auto* model : {&ours, &reference}) (*model)->to(torch::kDouble);
    check_whole(ours, reference, on);
  });
}

} // namespace shardwise::test::parameter_mesh
