#include "programs/machine.h"

#include "group/leaf_storage.h"
#include "layout/shards.h"

#include <c10/util/StringUtil.h>

namespace shardwise::test {
namespace {

using torch::Tensor;

/// What a random program asserts: raises std::runtime_error, on whatever rank.
void require(bool holds, const std::string& what) {
  if (!holds) throw std::runtime_error(what);
}

void require_close(const Tensor& ours, const Tensor& plain, const std::string& what) {
  require(ours.sizes() == plain.sizes(), c10::str(what, " has sizes ", ours.sizes(), ", not ", plain.sizes()));
  require(
      torch::allclose(ours, plain, 1e-7, 1e-9),
      c10::str(what, " differs; ours:\n", ours, "\nthe plain model's:\n", plain));
}

std::unique_ptr<torch::optim::Optimizer> make_optimizer(bool adam, torch::nn::Module& model) {
  // A large epsilon: noise in gradients that are zero must stay noise.
  if (adam) {
    return std::make_unique<torch::optim::AdamW>(
        model.parameters(), torch::optim::AdamWOptions(0.02).eps(1e-2).weight_decay(0.05));
  }
  return std::make_unique<torch::optim::SGD>(model.parameters(), torch::optim::SGDOptions(0.01).momentum(0.5));
}

bool throws(const std::function<void()>& act) {
  try {
    act();
  } catch (const Thrown&) {
    return true;
  } catch (const std::exception& error) {
    // Autograd's own threads hand errors on by their text.
    if (std::string(error.what()).find(Thrown().what()) != std::string::npos) return true;
    throw;
  }
  return false;
}

Tensor sum_of(const std::vector<Tensor>& losses) {
  Tensor sum = losses.front();
  for (size_t i = 1; i < losses.size(); ++i) sum = sum + losses[i];
  return sum;
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

void Machine::run() {
  check();
  for (size_t i = 0; i < program_.instructions.size(); ++i) {
    const auto text = c10::str("program ", program_.seed, ", ", i, ". ", program_.instructions[i].text());
    rank_.step(text);
    try {
      execute(program_.instructions[i]);
      check();
    } catch (const c10::Error& error) {
      throw std::runtime_error(c10::str(text, ": ", error.what_without_backtrace()));
    } catch (const std::exception& error) {
      throw std::runtime_error(c10::str(text, ": ", error.what()));
    }
  }
  reset_trees();
  for (size_t i = 0; i < units_.size(); ++i) check_freed(static_cast<int>(i), true);
}

void Machine::execute(const Instruction& instruction) {
  using Kind = Instruction::Kind;
  const auto flag = instruction.flag;
  const auto set = [&](const auto& change) { change(units_[static_cast<size_t>(instruction.which)]); };
  switch (instruction.kind) {
    case Kind::forward:
      graphs_.push_back(run_forward(instruction.seed));
      break;
    case Kind::no_grad: {
      const torch::NoGradGuard guard;
      evaluate(instruction.seed);
      break;
    }
    case Kind::inference: {
      const c10::InferenceMode guard;
      evaluate(instruction.seed);
      break;
    }
    case Kind::backward: {
      const auto first = instruction.flag2 ? graphs_.begin() : graphs_.end() - 1;
      const std::vector<Graph> chosen(first, graphs_.end());
      if (!flag) graphs_.erase(first, graphs_.end());
      backward(chosen, flag);
      break;
    }
    case Kind::backward_some: {
      const auto graph = graphs_.back();
      graphs_.pop_back();
      backward({graph}, false, &instruction.names);
      break;
    }
    case Kind::gradient_of_input:
      gradient_of_input(graphs_.back(), instruction.names);
      break;
    case Kind::forget_graphs:
      graphs_.clear();
      break;
    case Kind::throw_in_forward:
      throw_in_forward(instruction);
      break;
    case Kind::throw_in_backward:
      throw_in_backward(instruction);
      break;
    case Kind::sync:
      set([&](Unit& unit) { unit.set_requires_gradient_sync(flag, instruction.flag2); });
      for_units(instruction.which, instruction.flag2, [&](UnitState& state) { state.sync = flag; });
      break;
    case Kind::all_reduce:
      set([&](Unit& unit) { unit.set_requires_all_reduce(flag, instruction.flag2); });
      for_units(instruction.which, instruction.flag2, [&](UnitState& state) { state.all_reduce = flag; });
      break;
    case Kind::look_ahead:
      set([&](Unit& unit) { unit.set_prefetch(flag); });
      break;
    case Kind::reshard_after_forward:
      set([&](Unit& unit) { unit.set_reshard_after_forward(flag, instruction.flag2); });
      break;
    case Kind::reshard_after_backward:
      set([&](Unit& unit) { unit.set_reshard_after_backward(flag, instruction.flag2); });
      for_units(instruction.which, instruction.flag2, [&](UnitState& state) { state.frees_after_backward = flag; });
      break;
    case Kind::unshard_in_backward:
      set([&](Unit& unit) { unit.set_unshard_in_backward(flag); });
      break;
    case Kind::prefetch:
      set([&](Unit& unit) {
        std::vector<Unit> others;
        for (const int other : instruction.units) others.push_back(units_[static_cast<size_t>(other)]);
        flag ? unit.set_backward_prefetch(others) : unit.set_forward_prefetch(others);
      });
      break;
    case Kind::unshard:
      set([&](Unit& unit) {
        auto unsharding = unit.unshard(/*async=*/flag);
        if (flag && instruction.flag2) unsharding.wait();
      });
      break;
    case Kind::reshard:
      set([](Unit& unit) { unit.reshard(); });
      break;
    case Kind::reset:
      reset(instruction.which);
      break;
    case Kind::write:
      write(instruction);
      break;
    case Kind::freeze: {
      auto shards = ours_->named_parameters();
      for (const auto& name : instruction.names) {
        shards[name].set_requires_grad(flag);
        plain_parameters_[name].set_requires_grad(flag);
      }
      break;
    }
    case Kind::step:
      mine_->step();
      theirs_->step();
      break;
    case Kind::zero_grad:
      if (instruction.flag2) {
        ours_->zero_grad(flag);
        plain_->zero_grad(flag);
      } else {
        mine_->zero_grad(flag);
        theirs_->zero_grad(flag);
      }
      break;
  }
}

Tensor Machine::input(uint64_t seed, int rank) const {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(seed * Program::kRanks + static_cast<uint64_t>(rank));
  return torch::randn({3, program_.model.width}, generator, torch::kDouble);
}

Machine::Graph Machine::run_forward(uint64_t seed, std::optional<int> throws_backward) {
  const auto loss_of = [&](NodeImpl& model, Walk& walk, const Tensor& input) {
    return torch::log1p(model.forward(input, walk).pow(2)).mean() * (1 + mixed({seed, 5}, 3));
  };
  Graph graph;
  Walk walk{.seed = seed, .rank = rank_.rank(), .throws_backward = throws_backward};
  // So that the first unit is used in backward as the others are, whichever of its parameters a rank uses.
  graph.input = input(seed, rank_.rank()).requires_grad_();
  graph.loss = loss_of(*ours_, walk, graph.input);
  engage(walk.ran, &graph.units);
  for (int r = 0; r < Program::kRanks; ++r) {
    Walk plain{.seed = seed, .rank = r};
    graph.plain_inputs.push_back(input(seed, r).requires_grad_());
    graph.plain_losses.push_back(loss_of(*plain_, plain, graph.plain_inputs.back()));
  }
  require_close(graph.loss.detach(), graph.plain_losses[rank_.rank()].detach(), "the loss");
  return graph;
}

void Machine::engage(const std::set<int>& nodes, std::set<int>* units) {
  for (const int node : nodes) {
    const int unit = unit_of_node_.at(node);
    if (unit < 0) continue;
    states_[static_cast<size_t>(unit)].engaged = true;
    if (units != nullptr) units->insert(unit);
  }
}

void Machine::evaluate(uint64_t seed) {
  Walk walk{.seed = seed, .rank = rank_.rank()};
  const auto x = input(seed, rank_.rank());
  const auto ours = ours_->forward(x, walk);
  require_close(ours, plain_->forward(x, walk), "the output");
}

void Machine::backward(const std::vector<Graph>& graphs, bool keeps, const std::vector<std::string>* names) {
  std::vector<Tensor> losses, plain_losses;
  for (const auto& graph : graphs) {
    losses.push_back(graph.loss);
    for (const auto& loss : graph.plain_losses) plain_losses.push_back(loss / Program::kRanks);
  }
  std::vector<std::string> wanted;
  for (const auto& entry : plain_parameters_) {
    const auto& name = entry.key();
    if (!entry.value().requires_grad()) continue;
    if (names != nullptr) {
      // What a forward did not use may be frozen still where its unit has not run since.
      if (std::find(names->begin(), names->end(), name) == names->end()) continue;
      if (!graphs.front().units.contains(program_.unit_of(name))) continue;
    }
    wanted.push_back(name);
  }
  std::vector<Tensor> members, inputs;
  for (const auto& name : wanted) {
    members.push_back(members_.at(name));
    inputs.push_back(plain_parameters_[name]);
  }
  if (names == nullptr) {
    sum_of(losses).backward({}, keeps);
  } else {
    sum_of(losses).backward({}, keeps, false, members);
  }
  const auto gradients = torch::autograd::grad({sum_of(plain_losses)}, inputs, {}, keeps, false, /*allow_unused=*/true);
  std::map<std::string, Tensor> came;
  for (size_t i = 0; i < wanted.size(); ++i) {
    if (gradients[i].defined()) came[wanted[i]] = gradients[i];
  }
  average(came);
}

// Only the trees that a gradient came to, and there the units that were used, unless they are replicated.
void Machine::average(const std::map<std::string, Tensor>& gradients) {
  std::set<int> tops;
  for (const auto& [name, gradient] : gradients) {
    const int unit = program_.unit_of(name);
    tops.insert(program_.top_of(unit));
    states_[static_cast<size_t>(unit)].engaged = true;
  }
  for (size_t i = 0; i < units_.size(); ++i) {
    const auto& spec = program_.units[i];
    auto& state = states_[i];
    if (!tops.contains(program_.top_of(static_cast<int>(i)))) continue;
    const bool takes_part = state.engaged || !spec.is_sharded;
    state.engaged = false;
    if (!takes_part) continue;
    // A sum over shards' ranks alone is all there is where there are no copies.
    const bool publishes = state.sync && (state.all_reduce || (spec.is_sharded && program_.copies == 1));
    const double scale = spec.divisor ? Program::kRanks / *spec.divisor : 1;
    for (const auto& name : spec.parameters) {
      auto& parameter = plain_parameters_[name];
      auto sum = std::exchange(waiting_[name], Tensor());
      if (const auto came = gradients.find(name); came != gradients.end()) {
        sum = sum.defined() ? sum + came->second : came->second;
      }
      if (!sum.defined()) continue;
      if (!publishes) {
        waiting_[name] = sum;
      } else {
        // Also of what was frozen since.
        auto& grad = parameter.mutable_grad();
        grad = grad.defined() ? grad + scale * sum : scale * sum;
      }
    }
  }
  for (const int top : tops) check_freed(top, false);
}

void Machine::gradient_of_input(const Graph& graph, const std::vector<std::string>& names) {
  std::vector<Tensor> mine{graph.input}, theirs{graph.plain_inputs[rank_.rank()]};
  for (const auto& name : names) {
    mine.push_back(members_.at(name));
    theirs.push_back(plain_parameters_[name]);
  }
  const auto ours = torch::autograd::grad({graph.loss}, mine, {}, true, false, true);
  const auto plain = torch::autograd::grad({graph.plain_losses[rank_.rank()]}, theirs, {}, true, false, true);
  for (size_t i = 0; i < ours.size(); ++i) {
    require(ours[i].defined() == plain[i].defined(), c10::str("grad() ", i, " is there, or is not"));
    if (plain[i].defined()) require_close(ours[i], plain[i], c10::str("grad() ", i));
  }
  for (const auto& name : names) {
    const int unit = program_.unit_of(name);
    if (graph.units.contains(unit)) states_[static_cast<size_t>(unit)].engaged = true;
  }
}

void Machine::throw_in_forward(const Instruction& instruction) {
  Walk walk{.seed = instruction.seed, .rank = rank_.rank(), .throws_forward = instruction.which};
  require(throws([&] { ours_->forward(input(instruction.seed, rank_.rank()), walk); }), "it did not throw");
  engage(walk.ran);
  if (instruction.flag) reset_trees();
}

void Machine::throw_in_backward(const Instruction& instruction) {
  graphs_.clear();
  auto graph = run_forward(instruction.seed, instruction.which);
  require(throws([&] { graph.loss.backward(); }), "it did not throw");
  if (instruction.flag) reset_trees();
}

void Machine::reset(int unit) {
  units_[static_cast<size_t>(unit)].reset();
  for_units(program_.top_of(unit), true, [](UnitState& state) { state.engaged = false; });
}

void Machine::reset_trees() {
  for (size_t i = 0; i < units_.size(); ++i) {
    if (program_.units[i].outer < 0) reset(static_cast<int>(i));
  }
}

void Machine::write(const Instruction& instruction) {
  const torch::NoGradGuard guard;
  const auto change = [&](Tensor& parameter) {
    switch (instruction.which) {
      case 0:
        parameter.mul_(0.9);
        break;
      case 1:
        parameter.data().add_(0.01);
        break;
      case 2:
        parameter.set_data(parameter.clone());
        break;
      case 3:
        parameter.detach().sub_(0.02);
        break;
      default:
        torch::add_out(parameter, parameter, parameter.detach(), 0.1);
        break;
    }
  };
  auto shards = ours_->named_parameters();
  for (const auto& name : instruction.names) {
    change(shards[name]);
    change(plain_parameters_[name]);
  }
}

template <typename Do>
void Machine::for_units(int unit, bool below, const Do& act) {
  for (size_t i = 0; i < states_.size(); ++i) {
    const int index = static_cast<int>(i);
    if (index == unit || (below && program_.is_in(index, unit))) act(states_[i]);
  }
}

Tensor Machine::piece_of(const std::string& name, const Tensor& whole) const {
  const int unit = program_.unit_of(name);
  if (unit < 0 || !program_.units[static_cast<size_t>(unit)].is_sharded) return whole;
  const auto& spec = program_.units[static_cast<size_t>(unit)];
  const int64_t parts = Program::kRanks / program_.copies;
  const int64_t part = rank_.rank() % parts;
  if (spec.is_flat) {
    std::vector<std::vector<int64_t>> shapes;
    size_t index = 0;
    for (size_t i = 0; i < spec.parameters.size(); ++i) {
      shapes.push_back(plain_parameters_[spec.parameters[i]].sizes().vec());
      if (spec.parameters[i] == name) index = i;
    }
    const auto cut = layout::flat(shapes, parts, 128 / static_cast<int64_t>(sizeof(double))).cuts[index];
    return whole.flatten().narrow(0, cut.starts[part], cut.length(part));
  }
  const auto dim = spec.is_last_dim ? whole.dim() - 1 : 0;
  const auto chunk = (whole.size(dim) + parts - 1) / parts;
  const auto start = std::min(part * chunk, whole.size(dim));
  return whole.narrow(dim, start, std::min(chunk, whole.size(dim) - start));
}

void Machine::check() const {
  const auto shards = ours_->named_parameters();
  require(shards.keys() == plain_parameters_.keys(), "the names of the parameters differ");
  for (const auto& entry : shards) {
    const auto text = entry.key() + " of " + rank_.name();
    const auto& plain = plain_parameters_[entry.key()];
    const auto& ours = entry.value();
    require_close(ours.detach(), piece_of(entry.key(), plain.detach()), text);
    const auto presence = c10::str("the gradient of ", text, ours.grad().defined() ? " is there" : " is missing");
    require(ours.grad().defined() == plain.grad().defined(), presence);
    if (plain.grad().defined()) {
      require_close(ours.grad(), piece_of(entry.key(), plain.grad()), "the gradient of " + text);
    }
  }
}

void Machine::check_freed(int top, bool all) const {
  for (size_t i = 0; i < units_.size(); ++i) {
    const auto& spec = program_.units[i];
    if (!spec.is_sharded || !program_.is_in(static_cast<int>(i), top)) continue;
    if (!all && !states_[i].frees_after_backward) continue;
    for (const auto& name : spec.parameters) require(group::is_freed(members_.at(name)), name + " is not freed");
  }
}

} // namespace shardwise::test
