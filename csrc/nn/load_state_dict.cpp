#include <shardwise/state_dict.h>

#include "base/compute_guard.h"
#include "comm/messages.h"
#include "group/leaf_storage.h"
#include "nn/module_state.h"

#include <shardwise/error.h>

#include <ATen/ops/empty.h>
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
  if (value.layout() != at::kStrided || value.is_meta()) return "is no dense tensor with values in the dict";
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

std::string listed(const char* title, const std::vector<std::string>& items) {
  return items.empty() ? "" : c10::str("\n  ", title, ": ", c10::Join(", ", items));
}

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

constexpr auto kLoad = "load_full_state_dict";

/// A list of names as one text, and back.
std::string packed(const std::vector<std::string>& names) {
  std::string text;
  for (const auto& name : names) text += name + '\0';
  return text;
}

std::vector<std::string> unpacked(const std::string& text) {
  std::vector<std::string> names;
  for (size_t start = 0; start < text.size();) {
    const auto end = text.find('\0', start);
    names.push_back(text.substr(start, end - start));
    start = end + 1;
  }
  return names;
}

/// Brings the values of rank 0 to all ranks, one after the other.
class Source {
 public:
  /// Without a unit each rank uses its own values.
  explicit Source(engine::Unit* unit) : unit_(unit != nullptr && unit->ranks().world() > 1 ? unit : nullptr) {}

  bool is_here() const {
    return unit_ == nullptr || unit_->mesh().rank() == 0;
  }

  void share(std::vector<std::string>& names) const {
    if (unit_ == nullptr) return;
    const auto what = "the names that rank 0 loads";
    names = unpacked(
        comm::gather_texts(packed(names), unit_->ranks().axes(), unit_->mesh().device(), what, unit_->own_counters())
            .front());
  }

  /// Sent as bytes, which every back end can do whatever the dtype.
  at::Tensor get(const Entry& entry, const at::Tensor& value) const {
    if (unit_ == nullptr) return value;
    const base::ComputeGuard guard;
    const auto options = entry.tensor.options().device(unit_->mesh().device());
    const auto whole = is_here() ? value.to(options.device()).contiguous() : at::empty(entry.sizes, options);
    if (whole.numel() == 0) return whole;
    auto& counters = (entry.unit ? *entry.unit : *unit_).own_counters();
    const auto what = c10::str("the broadcast of '", entry.names.front(), "' from the state dict of rank 0");
    unit_->ranks().spread(whole.view({-1}).view(at::kByte), what, counters);
    return whole;
  }

 private:
  engine::Unit* unit_;
};

void store(const Entry& entry, const at::Tensor& value) {
  const c10::InferenceMode no_inference(false);
  if (entry.copies != nullptr) return entry.copies->store(entry.index, value);
  const c10::AutoGradMode no_grad(false);
  auto target = entry.tensor;
  target.copy_(value);
}

} // namespace

LoadResult load_full_state_dict(torch::nn::Module& module, const StateDict& dict, const LoadStateDictOptions& options) {
  nn::ModuleState state(module);
  const bool from_rank0 = options.broadcast_from_rank0() && !state.meshes().empty();
  if (from_rank0 && state.meshes().size() > 1) {
    throw ValueError(c10::str(
        "shardwise: the units of this ", module.name(), " lie on ", state.meshes().size(),
        " meshes, which have no common rank 0. Give the dict to every rank, with broadcast_from_rank0(false)."));
  }
  auto* const root = state.meshes().empty() ? nullptr : state.meshes().front().get();
  const Source source(from_rank0 ? root : nullptr);
  auto error = state.locate();
  Match found;
  if (source.is_here() && error.empty()) {
    found = match(state, dict);
    error = error_of(found, options.strict(), root == nullptr ? 0 : root->mesh().rank());
  }
  state.agree(kLoad, error);
  if (!options.strict()) {
    source.share(found.missing);
    source.share(found.unexpected);
  }
  const std::set<std::string> missing(found.missing.begin(), found.missing.end());
  found.values.resize(state.entries().size());
  LoadResult result;
  for (size_t i = 0; i < state.entries().size(); ++i) {
    const auto& entry = state.entries()[i];
    if (missing.contains(entry.names.front())) continue;
    const auto value = source.get(entry, found.values[i]);
    store(entry, value);
    result.elements += value.numel();
  }
  result.missing = std::move(found.missing);
  result.unexpected = std::move(found.unexpected);
  return result;
}

} // namespace shardwise
