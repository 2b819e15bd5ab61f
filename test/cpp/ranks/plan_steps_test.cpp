// What plan() says, held against what steps do: counters of collectives, and the memory of shards and full copies.
#include "ranks/mixed_precision_models.h"
#include "ranks/state_models.h"

#include <set>

namespace shardwise::test {
namespace {

Plan::Group total(const Plan& plan) {
  Plan::Group sum;
  for (const auto& unit : plan.units) {
    for (const auto& group : unit.groups) {
      sum.bytes += group.bytes;
      sum.shard_bytes += group.shard_bytes;
      sum.padding_bytes += group.padding_bytes;
      sum.full_bytes += group.full_bytes;
      sum.forward_gathers += group.forward_gathers;
      sum.backward_gathers += group.backward_gathers;
      sum.reduce_scatters += group.reduce_scatters;
      sum.all_reduces += group.all_reduces;
    }
  }
  return sum;
}

/// Bytes of the memory that these tensors lie in.
int64_t bytes_of(const std::vector<torch::Tensor>& tensors) {
  std::set<const void*> seen;
  int64_t bytes = 0;
  for (const auto& tensor : tensors) {
    const auto& storage = tensor.storage();
    if (seen.insert(storage.unsafeGetStorageImpl()).second) bytes += static_cast<int64_t>(storage.nbytes());
  }
  return bytes;
}

/// The members of a module, which the registry does not have where they are sharded.
std::vector<torch::Tensor> members(Stack& model) {
  std::vector<torch::Tensor> all{model->embedding->weight, model->head->weight};
  for (size_t i = 0; i < model->blocks->size(); ++i) {
    const auto block = model->block(i);
    for (const auto& tensor :
         {block->up->weight, block->up->bias, block->down->weight, block->down->bias, block->norm->weight,
          block->norm->bias}) {
      all.push_back(tensor);
    }
  }
  return all;
}

template <typename Model>
void check_steps(
    Rank& rank, Model& model, const Unit& root, const std::function<torch::Tensor(Model&, int, int)>& loss,
    const std::string& what) {
  SCOPED_TRACE(what);
  rank.step(what);
  torch::optim::SGD optimizer(model->parameters(), 0.01);
  Counters before;
  for (int step = 0; step < 6; ++step) {
    // At first the ranks compare what they run.
    if (step == 3) before = root.counters();
    optimizer.zero_grad();
    loss(model, step, rank.rank()).backward();
    optimizer.step();
  }
  const auto after = root.counters();
  const auto sum = total(root.plan());
  ASSERT_EQ(after.comparisons, before.comparisons);
  ASSERT_EQ(after.all_gathers - before.all_gathers, 3 * (sum.forward_gathers.calls + sum.backward_gathers.calls));
  ASSERT_EQ(after.reduce_scatters - before.reduce_scatters, 3 * sum.reduce_scatters.calls);
  ASSERT_EQ(after.all_reduces - before.all_reduces, 3 * sum.all_reduces.calls);
  ASSERT_EQ(
      after.collective_bytes - before.collective_bytes,
      3 * (sum.forward_gathers.bytes + sum.backward_gathers.bytes + sum.reduce_scatters.bytes + sum.all_reduces.bytes));
  const auto parameters = model->parameters();
  int64_t pieces = 0;
  for (const auto& parameter : parameters) pieces += static_cast<int64_t>(parameter.nbytes());
  ASSERT_EQ(bytes_of(parameters), sum.shard_bytes);
  ASSERT_EQ(sum.shard_bytes - sum.padding_bytes, pieces);
}

torch::Tensor called(Stack& model, int step, int rank) {
  return call(model, tokens(step, rank)).pow(2).mean();
}

void check_stack(Rank& rank, const FullyShardOptions& options, const std::string& what) {
  Stack model;
  auto root = shard_stack(model, options);
  check_steps<Stack>(rank, model, root, called, what);
  root.unshard();
  for (size_t i = 0; i < 3; ++i) unit(*model->block(i)).unshard();
  ASSERT_EQ(bytes_of(members(model)), total(root.plan()).full_bytes) << what;
}

const auto kLowParameters = policy({});

} // namespace

TEST(PlanSteps, EveryPolicyOfResharding) {
  const auto every_policy = [](Rank& rank) {
    using Reshard = std::optional<ReshardAfterForward>;
    const std::vector<std::pair<Reshard, std::string>> policies{
        {Reshard(), "after forward"},
        {Reshard(true), "after forward"},
        {Reshard(false), "after backward"},
        {Reshard(rank.world_size() / 2), rank.world_size() == 2 ? "after backward" : "to 2 ranks after forward"},
        {Reshard(rank.world_size()), "after forward"}};
    for (const auto layout : {ShardLayout::rows, ShardLayout::flat}) {
      for (const auto& precision : {MixedPrecision(), kLowParameters}) {
        for (const auto& [reshard, text] : policies) {
          const auto options =
              sharded_on(rank).reshard_after_forward(reshard).layout(layout).mixed_precision(precision);
          check_stack(rank, options, text);
          Stack model;
          const auto units = shard_stack(model, options).plan().units;
          ASSERT_EQ(units.at(0).reshard, text);
          ASSERT_EQ(units.at(0).axes, (std::vector<std::pair<std::string, int64_t>>{{"world", rank.world_size()}}));
          ASSERT_EQ(units.back().reshard, reshard ? text : "after backward") << "the outermost";
          const auto& group = units.at(0).groups.at(0);
          ASSERT_EQ(group.layout, layout == ShardLayout::flat ? "flat" : "rows");
          ASSERT_EQ(group.dtype, "float32");
          ASSERT_EQ(group.compute_dtype, precision.param_dtype() ? "bfloat16" : "float32");
          ASSERT_EQ(group.reduce_dtype, "float32");
        }
      }
    }
  };
  on_ranks(every_policy, by_form<std::vector<int>>({4}, {2, 4}));
}

TEST(PlanSteps, CopiesOfShards) {
  for (const auto grid :
       by_form<std::vector<Grid>>({{2, 1}, {1, 2}, {2, 2}}, {{2, 1}, {1, 2}, {2, 2}, {4, 1}, {1, 4}, {2, 3}})) {
    run_ranks(grid.world(), [&](Rank& rank) {
      check_stack(rank, hybrid_on(rank, grid), grid.name());
      check_stack(rank, hybrid_on(rank, grid).mixed_precision(kLowParameters).reshard_after_forward(true), grid.name());
      Stack model;
      auto root = shard_stack(model, hybrid_on(rank, grid));
      root.set_requires_all_reduce(false);
      check_steps<Stack>(rank, model, root, called, "partial sums");
      root.set_requires_gradient_sync(false);
      check_steps<Stack>(rank, model, root, called, "no sums");
      ASSERT_EQ(total(root.plan()).reduce_scatters.calls, 0);
      const std::vector<std::pair<std::string, int64_t>> axes{{"replicate", grid.copies}, {"shard", grid.shards}};
      ASSERT_EQ(root.plan().units[0].axes, axes);
    });
  }
}

TEST(PlanSteps, ReplicatedUnits) {
  on_ranks(
      [](Rank& rank) {
        for (const auto& options : {on(rank), on(rank).mixed_precision(kLowParameters)}) {
          Stack model;
          for (auto& block : *model->blocks) replicate(*block, options);
          auto root = replicate(model, options);
          check_steps<Stack>(rank, model, root, called, "replicate");
          const auto plan = root.plan();
          const auto sum = total(plan);
          ASSERT_EQ(plan.units[0].groups[0].layout, "replicated");
          ASSERT_EQ(plan.units[0].reshard, sum.full_bytes > 0 ? "after backward" : "-");
          ASSERT_EQ(sum.full_bytes, options.mixed_precision().param_dtype() ? sum.bytes / 2 : 0);
        }
      },
      by_form<std::vector<int>>({1, 2}, {1, 2, 4}));
}

/// Two dtypes, a list, and a unit inside.
struct MixedDtypesImpl : torch::nn::Module {
  MixedDtypesImpl() {
    second->to(torch::kDouble);
    list->append(torch::zeros({2, 2}).requires_grad_());
    fill(*this);
  }
  torch::Tensor forward(const torch::Tensor& x) {
    const auto y = second->forward(torch::tanh(first->forward(x)).to(torch::kDouble)).to(torch::kFloat);
    return last->forward(y).matmul((*list)[0]);
  }
  torch::nn::Linear first = register_module("first", torch::nn::Linear(4, 5));
  torch::nn::Linear second = register_module("second", torch::nn::Linear(5, 3));
  torch::nn::Linear last = register_module("last", torch::nn::Linear(3, 2));
  torch::nn::ParameterList list = register_module("list", torch::nn::ParameterList());
};
TORCH_MODULE(MixedDtypes);

TEST(PlanSteps, SeveralDtypesFrozenAndWholeParameters) {
  on_worlds([](Rank& rank) {
    for (const auto& options : layouts(rank)) {
      MixedDtypes model;
      model->first->bias.set_requires_grad(false);
      fully_shard(model->last, options);
      const auto root = fully_shard(model, options);
      model->last->parameters()[1].set_requires_grad(false);
      const std::function<torch::Tensor(MixedDtypes&, int, int)> loss = [](MixedDtypes& mixed, int step, int r) {
        return call(mixed, batch(step, r, 4)).pow(2).sum();
      };
      check_steps(rank, model, root, loss, "several dtypes");
      const auto groups = root.plan().units.at(1).groups;
      ASSERT_EQ(groups.size(), 3U) << root.plan().table();
      ASSERT_EQ(groups[1].dtype, "float64");
      ASSERT_EQ(groups[2].layout, "replicated") << "a ParameterList stays whole";
      ASSERT_EQ(groups[2].all_reduces.calls, 1);
      ASSERT_EQ(groups[2].reduce_scatters.calls + groups[2].forward_gathers.calls, 0);
      // One parameter of two is trained.
      ASSERT_LT(groups[0].bucket_bytes, groups[0].bytes + 512 * rank.world_size());
    }
  });
}

} // namespace shardwise::test
