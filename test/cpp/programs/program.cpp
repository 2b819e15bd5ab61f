#include "programs/program.h"

#include <c10/util/StringUtil.h>

#include <algorithm>
#include <array>
#include <functional>

namespace shardwise::test {
namespace {

std::string join(const std::vector<std::string>& parts) {
  std::string text;
  for (const auto& part : parts) text += (text.empty() ? "" : " ") + (part.empty() ? "(the model)" : part);
  return text;
}

std::string below(const std::string& path, const std::string& name) {
  return path.empty() ? name : path + "." + name;
}

bool covers(const std::string& path, const std::string& name) {
  return path.empty() || name == path || name.starts_with(path + ".");
}

std::string child_path(const std::string& path, const NodeSpec& spec, size_t index) {
  if (spec.in_list) return below(path, "list." + std::to_string(index));
  return below(path, "child" + std::to_string(spec.children[index].id));
}

void run(const NodeSpec& spec, const Walk& walk, std::vector<int>& nodes) {
  nodes.push_back(spec.id);
  for (const int call : spec.calls) {
    const auto& child = spec.children[static_cast<size_t>(call)];
    if (!walk.skips(child.id)) run(child, walk, nodes);
  }
}

std::string unit_text(int unit) {
  return "unit " + std::to_string(unit);
}

} // namespace

std::vector<int> nodes_that_run(const NodeSpec& root, uint64_t seed) {
  std::vector<int> nodes;
  run(root, Walk{.seed = seed}, nodes);
  return nodes;
}

Program::Program(uint64_t seed, bool plain) : seed(seed) {
  Random random(seed);
  model = ModelSpec::random(random);
  one_group = random.chance(25);
  adam = random.chance(50);
  group_modules(random);
  find_owners();
  write_instructions(random);
  if (!plain) add_policies(random);
}

// Last, so that the rest of a program does not depend on them.
void Program::add_policies(Random& random) {
  copies = one_group ? 1 : random.of<int>({1, 1, 2, 2, 4});
  for (auto& unit : units) {
    if (copies == 1 && random.chance(25)) unit.holders = 2;
    if (random.chance(20)) unit.divisor = random.of<double>({1, 2, 3, 8});
    unit.divides_after = random.chance(20);
  }
  using Kind = Instruction::Kind;
  std::vector<Instruction> more;
  for (const auto& instruction : instructions) {
    const int unit = random.below(static_cast<int>(units.size()));
    if (random.chance(6)) {
      more.push_back({.kind = Kind::all_reduce, .which = unit, .flag = random.chance(50), .flag2 = random.chance(60)});
    }
    if (random.chance(3)) more.push_back({.kind = Kind::look_ahead, .which = unit, .flag = random.chance(50)});
    more.push_back(instruction);
  }
  instructions = more;
}

// Inner modules first, as the library wants them.
void Program::group_modules(Random& random) {
  has_root = random.chance(75);
  const int replicated = random.of<int>({0, 0, 0, 100, 30});
  const auto unit = [&](std::vector<std::string> modules, bool is_list = false) {
    UnitSpec spec{.modules = std::move(modules)};
    spec.is_sharded = is_list || !random.chance(replicated);
    spec.is_flat = random.chance(25);
    spec.is_last_dim = !spec.is_flat && random.chance(25);
    spec.reshard_after_forward = random.of<std::optional<bool>>({std::nullopt, true, false});
    units.push_back(spec);
  };
  const std::function<void(const NodeSpec&, const std::string&)> visit = [&](const NodeSpec& node,
                                                                             const std::string& path) {
    const bool is_root = path.empty();
    std::vector<std::string> alone;
    for (size_t i = 0; i < node.children.size(); ++i) {
      const auto child = child_path(path, node, i);
      visit(node.children[i], child);
      if (random.chance(60)) {
        unit({child});
      } else {
        alone.push_back(child);
      }
    }
    if (alone.size() >= 2 && random.chance(40)) {
      unit({alone[0], alone[1]}, true);
      alone.erase(alone.begin(), alone.begin() + 2);
    }
    if (node.in_list && !node.children.empty() && random.chance(20)) {
      unit({below(path, "list")});
      alone.clear();
    }
    if (is_root && !has_root) {
      for (const auto& child : alone) unit({child});
    }
  };
  visit(model.root, "");
  if (has_root) unit({""});
}

void Program::find_owners() {
  const auto names = make_model(model)->named_parameters().keys();
  for (size_t i = 0; i < units.size(); ++i) {
    auto& unit = units[i];
    for (const auto& name : names) {
      const bool is_inside =
          std::any_of(unit.modules.begin(), unit.modules.end(), [&](const auto& path) { return covers(path, name); });
      const auto has = [&](const UnitSpec& other) {
        return std::find(other.parameters.begin(), other.parameters.end(), name) != other.parameters.end();
      };
      if (is_inside && std::none_of(units.begin(), units.begin() + static_cast<int64_t>(i), has)) {
        unit.parameters.push_back(name);
      }
    }
    for (size_t j = i + 1; j < units.size() && unit.outer < 0; ++j) {
      const auto& outer = units[j].modules;
      if (std::any_of(outer.begin(), outer.end(), [&](const auto& path) { return covers(path, unit.modules[0]); })) {
        unit.outer = static_cast<int>(j);
      }
    }
  }
  const std::function<void(const NodeSpec&, const std::string&)> visit = [&](const NodeSpec& node,
                                                                             const std::string& path) {
    const auto scale = below(path, "scale");
    const bool is_top =
        has_root ? path.empty() : std::count(path.begin(), path.end(), '.') == (model.root.in_list ? 1 : 0);
    if (is_top && !(path.empty() && !has_root)) {
      top_scales_.push_back(scale);
    } else if (!node.has_maybe && !path.empty()) {
      may_freeze_.push_back(scale);
    }
    for (size_t i = 0; i < node.children.size(); ++i) visit(node.children[i], child_path(path, node, i));
  };
  visit(model.root, "");
  for (const auto& name : names) {
    if (!name.ends_with("scale") && unit_of(name) >= 0) may_freeze_.push_back(name);
  }
}

int Program::unit_of(const std::string& parameter) const {
  for (size_t i = 0; i < units.size(); ++i) {
    const auto& own = units[i].parameters;
    if (std::find(own.begin(), own.end(), parameter) != own.end()) return static_cast<int>(i);
  }
  return -1;
}

int Program::top_of(int unit) const {
  while (units[static_cast<size_t>(unit)].outer >= 0) unit = units[static_cast<size_t>(unit)].outer;
  return unit;
}

bool Program::is_in(int unit, int top) const {
  while (unit >= 0 && unit != top) unit = units[static_cast<size_t>(unit)].outer;
  return unit == top;
}

/// One in which a tree runs.
uint64_t Program::forward_seed(Random& random) const {
  while (true) {
    const auto chosen = random.seed();
    if (has_root || nodes_that_run(model.root, chosen).size() > 1) return chosen;
  }
}

void Program::write_instructions(Random& random) {
  using Kind = Instruction::Kind;
  int graphs = 0;
  const int steps = random.between(3, 5);
  for (int step = 0; step < steps; ++step) {
    const int count = random.between(3, 9);
    for (int i = 0; i < count; ++i) instructions.push_back(instruction(random, graphs));
    // Each step is one that trains.
    instructions.push_back({.kind = Kind::forward, .seed = forward_seed(random)});
    instructions.push_back({.kind = Kind::backward, .flag2 = true});
    graphs = 0;
    instructions.push_back({.kind = Kind::step});
    if (random.chance(80))
      instructions.push_back({.kind = Kind::zero_grad, .flag = random.chance(50), .flag2 = random.chance(50)});
  }
}

Instruction Program::instruction(Random& random, int& graphs) {
  using Kind = Instruction::Kind;
  const int unit = random.below(static_cast<int>(units.size()));
  const auto some = [&](const std::vector<std::string>& names, int most) {
    std::vector<std::string> chosen;
    for (int i = 0; i < most && !names.empty(); ++i) chosen.push_back(random.of(names));
    return chosen;
  };
  const int roll = random.below(100);
  if (graphs > 0 && roll < 25) {
    // All graphs at once or the last one, kept for another backward or not.
    const bool all = graphs > 1 && random.chance(50);
    const bool keeps = random.chance(25);
    if (!keeps) graphs = all ? 0 : graphs - 1;
    return {.kind = Kind::backward, .flag = keeps, .flag2 = all};
  }
  if (graphs > 0 && roll < 32) {
    auto names = top_scales_;
    for (const auto& name : some(may_freeze_, 3)) {
      names.push_back(name);
      // The unit's last gradient is one that all ranks have.
      const auto layer = name.find("maybe.");
      if (layer != std::string::npos) names.push_back(name.substr(0, layer) + "scale");
    }
    std::sort(names.begin(), names.end());
    names.erase(std::unique(names.begin(), names.end()), names.end());
    --graphs;
    return {.kind = Kind::backward_some, .names = names};
  }
  if (graphs > 0 && roll < 37) return {.kind = Kind::gradient_of_input, .names = some(top_scales_, 1)};
  if (roll < 50 && graphs < 3) {
    ++graphs;
    return {.kind = Kind::forward, .seed = forward_seed(random)};
  }
  if (roll < 55) return {.kind = random.chance(50) ? Kind::no_grad : Kind::inference, .seed = random.seed()};
  if (roll < 60) return {.kind = Kind::sync, .which = unit, .flag = random.chance(50), .flag2 = random.chance(60)};
  if (roll < 64)
    return {.kind = Kind::reshard_after_forward, .which = unit, .flag = random.chance(50), .flag2 = random.chance(40)};
  if (roll < 67)
    return {.kind = Kind::reshard_after_backward, .which = unit, .flag = random.chance(50), .flag2 = random.chance(40)};
  // Without it only operations bring full copies, and those of a layer that ranks may leave out differ.
  if (roll < 69 && !model.root.has_maybes()) {
    return {.kind = Kind::unshard_in_backward, .which = unit, .flag = random.chance(50)};
  }
  if (roll < 73) {
    std::vector<int> others;
    for (int i = random.below(3); i > 0; --i) others.push_back(random.below(static_cast<int>(units.size())));
    return {.kind = Kind::prefetch, .which = unit, .flag = random.chance(50), .units = others};
  }
  if (roll < 76) return {.kind = Kind::unshard, .which = unit, .flag = random.chance(50), .flag2 = random.chance(50)};
  if (roll < 79) return {.kind = Kind::reshard, .which = unit};
  if (roll < 80) return {.kind = Kind::reset, .which = unit};
  if (roll < 86) {
    const auto seed = forward_seed(random);
    const bool in_forward = random.chance(50);
    auto nodes = nodes_that_run(model.root, seed);
    // Before its first unit nothing has a gradient.
    if (!has_root && !in_forward) std::erase(nodes, model.root.id);
    if (!in_forward) graphs = 0;
    return {
        .kind = in_forward ? Kind::throw_in_forward : Kind::throw_in_backward,
        .seed = seed,
        .which = random.of(nodes),
        .flag = random.chance(30)};
  }
  if (roll < 90) return {.kind = Kind::zero_grad, .flag = random.chance(50), .flag2 = random.chance(50)};
  if (graphs > 0) {
    graphs = 0;
    return {.kind = Kind::forget_graphs};
  }
  if (roll < 94) return {.kind = Kind::write, .which = random.below(5), .names = some(may_freeze_, 4)};
  if (roll < 97) return {.kind = Kind::freeze, .flag = random.chance(50), .names = some(may_freeze_, 6)};
  return {.kind = Kind::step};
}

std::string UnitSpec::text() const {
  std::string text = (is_sharded ? "fully_shard" : "replicate") + std::string(" of ") + join(modules);
  if (is_sharded) {
    text += is_flat ? ", flat" : is_last_dim ? ", rows of the last dimension" : ", rows";
    if (holders > 0) text += ", held by " + std::to_string(holders) + " ranks";
    text += holders > 0 || !reshard_after_forward ? ""
            : *reshard_after_forward              ? ", freed after forward"
                                                  : ", kept after forward";
  }
  if (divisor) text += ", divided by " + std::to_string(*divisor);
  if (divides_after) text += ", divided after the sum";
  return text + (outer < 0 ? "" : ", inside of " + unit_text(outer)) + ": " + join(parameters);
}

std::string Instruction::text() const {
  // In the order of Kind. How the rest is read: Machine::execute().
  constexpr std::array kNames{
      "forward",
      "no_grad forward",
      "inference forward",
      "backward",
      "backward of some",
      "gradient of input",
      "forget graphs",
      "throw in forward",
      "throw in backward",
      "sync",
      "all_reduce",
      "look ahead",
      "reshard_after_forward",
      "reshard_after_backward",
      "unshard_in_backward",
      "prefetch",
      "unshard",
      "reshard",
      "reset",
      "write",
      "freeze",
      "step",
      "zero_grad"};
  auto text = c10::str(
      kNames.at(static_cast<size_t>(kind)), " (which ", which, ", flags ", flag, " ", flag2, ", seed ", seed, ")");
  if (!units.empty()) text += " units " + c10::Join(" ", units);
  return names.empty() ? text : text + ": " + join(names);
}

std::string Program::text() const {
  std::string text = "program " + std::to_string(seed) + " on " + std::to_string(kRanks) + " ranks, " +
                     (adam ? "AdamW" : "SGD") + (one_group ? ", one process group" : "") +
                     (copies > 1 ? ", " + std::to_string(copies) + " copies of shards" : "") + "\n" + model.text();
  for (size_t i = 0; i < units.size(); ++i) text += unit_text(static_cast<int>(i)) + ": " + units[i].text() + "\n";
  for (size_t i = 0; i < instructions.size(); ++i) {
    text += std::to_string(i) + ". " + instructions[i].text() + "\n";
  }
  return text;
}

} // namespace shardwise::test
