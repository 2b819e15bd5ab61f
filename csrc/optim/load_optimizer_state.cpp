#include "base/compute_guard.h"
#include "base/on_host.h"
#include "base/reason.h"
#include "nn/wrap/first_rank.h"
#include "optim/state_match.h"

#include <shardwise/optimizer_state_dict.h>

#include <ATen/ops/empty.h>
#include <c10/util/StringUtil.h>

namespace shardwise {
namespace {

using base::listed;
using optim::NamedParameter;
using optim::StateItem;

std::string error_of(const optim::StateMatch& match, const std::string& optimizer, bool strict, int64_t rank) {
  std::string lines;
  if (strict) lines = listed("missing in the dict", match.missing) + listed("not in the optimizer", match.unexpected);
  lines += listed("do not fit", match.wrong);
  if (lines.empty()) return "";
  return c10::str(
      "shardwise: the optimizer's state dict of rank ", rank, " does not fit this ", optimizer,
      ", and nothing was loaded:", lines,
      "\nGive the full_optimizer_state_dict() of the same model and of an optimizer of the same class",
      strict ? ", or strict(false) to load the names that both have." : ".");
}

/// The items to load, with the parameter of each, in an order that is the same on all ranks.
struct Load {
  std::vector<NamedParameter> parameters;
  std::vector<std::vector<StateItem>> items;
  int64_t numbers = 0;
};

Load items_to_load(
    std::vector<NamedParameter> parameters, const optim::OptimizerState& state, const std::vector<std::string>& keys) {
  const std::set<std::string> wanted(keys.begin(), keys.end());
  Load load{.parameters = std::move(parameters), .items = {}, .numbers = 0};
  for (const auto& parameter : load.parameters) {
    auto items = optim::items_of(parameter, state);
    std::erase_if(items, [&](const auto& item) { return !wanted.contains(item.key); });
    for (const auto& item : items) load.numbers += item.kind == StateItem::Kind::tensor ? 0 : item.numel;
    load.items.push_back(std::move(items));
  }
  return load;
}

/// All numbers and options, as one vector from the rank that has them.
at::Tensor share_numbers(const Load& load, const StateDict& dict, const nn::FirstRank& first) {
  const base::ComputeGuard guard;
  const auto mine = at::empty({load.numbers}, base::on_host(at::kDouble));
  int64_t start = 0;
  for (size_t i = 0; i < load.items.size() && first.is_here(); ++i) {
    for (const auto& item : load.items[i]) {
      if (item.kind == StateItem::Kind::tensor) continue;
      mine.narrow(0, start, item.numel).copy_(dict[item.key].reshape({-1}));
      start += item.numel;
    }
  }
  return first.share(mine, mine.sizes(), mine.options(), "the broadcast of numbers from the optimizer's dict of rank 0")
      .cpu();
}

/// This rank's piece of a whole tensor.
at::Tensor share_piece(
    const NamedParameter& parameter, const std::string& key, const StateDict& dict, const nn::FirstRank& first) {
  const auto& entry = parameter.entry;
  const auto what = c10::str("the broadcast of '", key, "' from the optimizer's dict of rank 0");
  const auto piece = entry.piece_of(first.share(first.is_here() ? dict[key] : at::Tensor(), entry, what));
  return entry.copies == nullptr ? piece : entry.copies->piece_in_whole(entry.index, piece);
}

/// Options first, since they decide which state a parameter must have.
int64_t set(const Load& load, const StateDict& dict, const nn::FirstRank& first, optim::OptimizerState& state) {
  const auto numbers = share_numbers(load, dict, first);
  std::vector<optim::ParameterState> states(load.parameters.size());
  int64_t start = 0;
  for (size_t i = 0; i < load.items.size(); ++i) {
    StateDict options;
    for (const auto& item : load.items[i]) {
      if (item.kind == StateItem::Kind::tensor) continue;
      const base::ComputeGuard guard;
      const auto values = numbers.narrow(0, start, item.numel);
      start += item.numel;
      item.kind == StateItem::Kind::option ? options.insert(item.name, values)
                                           : states[i].numbers.insert(item.name, values.select(0, 0));
    }
    state.set_options(load.parameters[i].group, options);
  }
  int64_t elements = 0;
  for (size_t i = 0; i < load.items.size(); ++i) {
    for (const auto& item : load.items[i]) {
      if (item.kind != StateItem::Kind::tensor) continue;
      states[i].tensors.insert(item.name, share_piece(load.parameters[i], item.key, dict, first));
      elements += item.numel;
    }
    if (!load.items[i].empty()) state.set(load.parameters[i].entry.tensor, states[i]);
    states[i] = {};
  }
  return elements;
}

} // namespace

LoadResult load_full_optimizer_state_dict(
    torch::nn::Module& module, torch::optim::Optimizer& optimizer, const StateDict& dict,
    const LoadStateDictOptions& options) {
  optim::OptimizerState state(optimizer);
  nn::ModuleState places(module);
  const nn::FirstRank first(module, places, options, "the optimizer's dict");
  auto error = places.locate();
  auto parameters = optim::named_parameters(places, state);
  if (error.empty()) error = optim::without_name(parameters, state);
  optim::StateMatch match;
  if (first.is_here() && error.empty()) {
    match = optim::match_state(parameters, state, dict);
    error = error_of(match, state.name(), options.strict(), places.rank());
  }
  places.agree(c10::str("load_full_optimizer_state_dict (", state.name(), ")"), error);
  const auto what = "the names that rank 0 loads";
  first.share(match.keys, what);
  if (!options.strict()) {
    first.share(match.missing, what);
    first.share(match.unexpected, what);
  }
  LoadResult result;
  result.elements = set(items_to_load(std::move(parameters), state, match.keys), dict, first, state);
  result.missing = std::move(match.missing);
  result.unexpected = std::move(match.unexpected);
  return result;
}

} // namespace shardwise
