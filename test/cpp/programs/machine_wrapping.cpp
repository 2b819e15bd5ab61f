#include "programs/machine.h"

namespace shardwise::test {
namespace {

using torch::Tensor;

std::unique_ptr<torch::optim::Optimizer> make_optimizer(bool adam, torch::nn::Module& model) {
  // A large epsilon: noise in gradients that are zero must stay noise.
  if (adam) {
    return std::make_unique<torch::optim::AdamW>(
        model.parameters(), torch::optim::AdamWOptions(0.02).eps(1e-2).weight_decay(0.05));
  }
  return std::make_unique<torch::optim::SGD>(model.parameters(), torch::optim::SGDOptions(0.01).momentum(0.5));
}

} // namespace

Machine::Machine(Rank& rank, const Program& program)
    : rank_(rank),
      program_(program),
      ours_(make_model(program.model)),
      plain_(make_model(program.model)) {
  for (auto* model : {ours_.get(), plain_.get()}) {
    for (auto& entry : model->named_parameters()) {
      if (program_.unit_of(entry.key()) < 0) entry.value().set_requires_grad(false);
    }
  }
  plain_parameters_ = plain_->named_parameters();
  for (const auto& entry : ours_->named_parameters()) members_[entry.key()] = entry.value();
  const auto note = [&](const std::string& path, const torch::nn::Module& module) {
    if (const auto* node = module.as<NodeImpl>()) {
      unit_of_node_[node->spec.id] = program_.unit_of(path.empty() ? "scale" : path + ".scale");
    }
  };
  for (const auto& entry : plain_->named_modules()) note(entry.key(), *entry.value());
  wrap();
  mine_ = make_optimizer(program_.adam, *ours_);
  theirs_ = make_optimizer(program_.adam, *plain_);
}

void Machine::wrap() {
  auto mesh = rank_.mesh();
  if (program_.one_group) mesh = Mesh::from_process_groups({"world"}, {mesh.group("world")}, rank_.device());
  const auto shards = Program::kRanks / program_.copies;
  const auto grid = program_.copies == 1 ? mesh : rank_.mesh({{"replicate", program_.copies}, {"shard", shards}});
  const auto modules = ours_->named_modules();
  for (const auto& spec : program_.units) {
    std::vector<std::shared_ptr<torch::nn::Module>> chosen;
    for (const auto& path : spec.modules) chosen.push_back(path.empty() ? ours_ : modules[path]);
    if (!spec.is_sharded) {
      units_.push_back(replicate(*chosen.front(), ReplicateOptions().mesh(mesh)));
    } else {
      auto options = FullyShardOptions().mesh(grid);
      if (spec.holders > 0) {
        options.reshard_after_forward(spec.holders);
      } else if (spec.reshard_after_forward) {
        options.reshard_after_forward(*spec.reshard_after_forward);
      }
      if (spec.is_flat) options.layout(ShardLayout::flat);
      if (spec.is_last_dim) {
        options.shard_placement([](const std::string&, const Tensor& parameter) { return parameter.dim() - 1; });
      }
      units_.push_back(chosen.size() == 1 ? fully_shard(*chosen.front(), options) : fully_shard(chosen, options));
    }
    if (spec.divisor) units_.back().set_gradient_divide_factor(*spec.divisor);
    units_.back().set_force_sum_reduction(spec.divides_after);
  }
  states_.resize(units_.size());
}

} // namespace shardwise::test
