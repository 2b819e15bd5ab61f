#include <shardwise/state_dict.h>

#include "base/reason.h"
#include "group/leaf_storage.h"
#include "nn/state/module_state.h"
#include "nn/wrap/first_rank.h"

#include <c10/util/StringUtil.h>

#include <set>

namespace shardwise {
namespace {

using Entry = nn::ModuleState::Entry;

/// How a dict fits a module.
struct Match {
  std::vector<at::Tensor> values;
  std::vector<std::string> missing;
  std::vector<std::string> unexpected;
  /// Values of the wrong shape, dtype and the like, one line each.
  std::vector<std::string> wrong;
};

std::string why_not(const Entry& entry, const at::Tensor& value) {
  if (!value.defined()) return "is undefined in the dict";
  if (value.layout() != at::kStrided || value.is_meta()) return "is not a dense tensor with values in the dict";
  if (value.sizes() != entry.sizes) {
    return c10::str("has shape ", at::IntArrayRef(entry.sizes), " here and ", value.sizes(), " in the dict");
  }
  if (value.scalar_type() != entry.tensor.scalar_type()) {
    return c10::str(
        "is ", c10::getDtypeNames(entry.tensor.scalar_type()).first, " here and ",
        c10::getDtypeNames(value.scalar_type()).first, " in the dict: cast it with to() first");
  }
  if (group::is_freed(value)) return "is the full copy of a sharded parameter in the dict, and its memory is freed";
  return "";
}

Match match(const nn::ModuleState& state, const StateDict& dict) {
  Match match;
  match.values.resize(state.entries().size());
  std::set<std::string> known;
  std::vector<bool> found(state.entries().size(), false);
  for (const auto& [name, index] : state.names()) {
    known.insert(name);
    const auto* value = dict.find(name);
    if (value == nullptr) continue;
    found[index] = true;
    const auto reason = why_not(state.entries()[index], *value);
    if (reason.empty()) {
      match.values[index] = *value;
    } else {
      match.wrong.push_back(c10::str("'", name, "' ", reason));
    }
  }
  for (const auto& [name, index] : state.names()) {
    if (!found[index]) match.missing.push_back(name);
  }
  for (const auto& item : dict) {
    if (!known.contains(item.key())) match.unexpected.push_back(item.key());
  }
  return match;
}

using base::listed;

std::string error_of(const Match& match, bool strict, int rank) {
  std::string lines;
  if (strict) lines = listed("missing in the dict", match.missing) + listed("not in the module", match.unexpected);
  lines += listed("do not fit", match.wrong);
  if (lines.empty()) return "";
  return c10::str(
      "shardwise: the state dict of rank ", rank, " does not fit the module, and nothing was loaded:", lines,
      "\nGive the full_state_dict() of the same model",
      strict ? ", or strict(false) to load the names that both have." : ".");
}

constexpr auto kNames = "the names that rank 0 loads";

void store(const Entry& entry, const at::Tensor& value) {
  const c10::InferenceMode no_inference(false);
  const auto piece = entry.piece_of(value);
  if (entry.copies != nullptr) return entry.copies->store(entry.index, piece);
  const c10::AutoGradMode no_grad(false);
  auto target = entry.tensor;
  target.copy_(piece);
}

} // namespace

LoadResult load_full_state_dict(torch::nn::Module& module, const StateDict& dict, const LoadStateDictOptions& options) {
  nn::ModuleState state(module);
  const nn::FirstRank first(module, state, options, "the dict");
  auto error = state.locate();
  Match found;
  if (first.is_here() && error.empty()) {
    found = match(state, dict);
    error = error_of(found, options.strict(), state.rank());
  }
  state.agree("load_full_state_dict", error);
  if (!options.strict()) {
    first.share(found.missing, kNames);
    first.share(found.unexpected, kNames);
  }
  const std::set<std::string> missing(found.missing.begin(), found.missing.end());
  found.values.resize(state.entries().size());
  LoadResult result;
  for (size_t i = 0; i < state.entries().size(); ++i) {
    const auto& entry = state.entries()[i];
    if (missing.contains(entry.names.front())) continue;
    const auto what = c10::str("the broadcast of '", entry.names.front(), "' from the state dict of rank 0");
    const auto value = first.share(found.values[i], entry, what);
    store(entry, value);
    result.elements += value.numel();
  }
  result.missing = std::move(found.missing);
  result.unexpected = std::move(found.unexpected);
  return result;
}

} // namespace shardwise
