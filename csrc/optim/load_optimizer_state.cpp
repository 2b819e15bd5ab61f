#include "base/compute_guard.h"
#include "base/on_host.h"
#include "base/reason.h"
#include "nn/wrap/first_rank.h"
#include "optim/state_match.h"

#include <shardwise/state_dict.h>

#include <ATen/ops/empty.h>
#include <c10/util/StringUtil.h>
#include <c10/util/accumulate.h>

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

/// All numbers and options with these keys, which travel as one vector from the rank that has them.
StateDict share_numbers(
    const std::vector<NamedParameter>& parameters, const optim::OptimizerState& state,
    const std::set<std::string>& keys, const StateDict& dict, const nn::FirstRank& first) {
  const base::ComputeGuard guard;
  std::vector<StateItem> items;
  std::vector<int64_t> sizes;
  for (const auto& parameter : parameters) {
    for (auto& item : optim::items_of(parameter, state, keys)) {
      if (item.kind == StateItem::Kind::tensor) continue;
      sizes.push_back(item.numel);
      items.push_back(std::move(item));
    }
  }
  const auto mine = at::empty({c10::sum_integers(sizes)}, base::on_host(at::kDouble));
  const auto places = mine.split_with_sizes(sizes);
  for (size_t i = 0; i < items.size() && first.is_here(); ++i) places[i].copy_(dict[items[i].key].reshape({-1}));
  const auto what = "the broadcast of numbers from the optimizer's dict of rank 0";
  const auto all = first.share(mine, mine.sizes(), mine.options(), what).cpu().split_with_sizes(sizes);
  StateDict numbers;
  for (size_t i = 0; i < items.size(); ++i) numbers.insert(items[i].key, all[i]);
  return numbers;
}

/// This rank's piece of a whole tensor.
at::Tensor share_piece(
    const NamedParameter& parameter, const std::string& key, const StateDict& dict, const nn::FirstRank& first) {
  const auto& entry = parameter.entry;
  const auto what = c10::str("the broadcast of '", key, "' from the optimizer's dict of rank 0");
  const auto piece = entry.piece_of(first.share(first.is_here() ? dict[key] : at::Tensor(), entry, what));
  return entry.copies == nullptr ? piece : entry.copies->piece_in_whole(entry.index, piece);
}

} // namespace

LoadResult load_full_optimizer_state_dict(
    torch::nn::Module& module, torch::optim::Optimizer& optimizer, const StateDict& dict,
    const LoadStateDictOptions& options) {
  optim::OptimizerState state(optimizer);
  nn::ModuleState places(module);
  const nn::FirstRank first(module, places, options, "the optimizer's dict");
  auto error = places.locate();
  const auto parameters = optim::named_parameters(places, state);
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
  const std::set<std::string> keys(match.keys.begin(), match.keys.end());
  LoadResult result;
  optim::set_state(
      state, parameters, keys, share_numbers(parameters, state, keys, dict, first),
      [&](const NamedParameter& parameter, const StateItem& item) {
        result.elements += item.numel;
        return share_piece(parameter, item.key, dict, first);
      });
  result.missing = std::move(match.missing);
  result.unexpected = std::move(match.unexpected);
  return result;
}

} // namespace shardwise
