#include "base/reason.h"
#include "optim/state_match.h"
#include "saves/module_pieces.h"
#include "saves/pieces.h"
#include "saves/ranks.h"

#include <shardwise/error.h>
#include <shardwise/save.h>

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <map>
#include <set>

namespace shardwise {
namespace {

using base::listed;

/// What a checkpoint brings to one rank: first compared, then read.
class Loading {
 public:
  Loading(nn::ModuleState& module, torch::optim::Optimizer* optimizer, files::SavedFolder folder)
      : module_(module),
        folder_(std::move(folder)) {
    loaded_.unverified = !folder_.index().marker;
    match_module();
    if (optimizer != nullptr) match_optimizer(*optimizer);
    for (const auto& [name, saved] : folder_.index().tensors) {
      const bool is_others =
          name.starts_with(files::kProgram) || (optimizer == nullptr && name.starts_with(files::kOptimizer));
      if (!known_.contains(name) && !is_others) loaded_.unexpected.push_back(name);
    }
    for (const auto& [name, dtype] : folder_.index().unknown) {
      if (!known_.contains(name)) loaded_.unexpected.push_back(name);
    }
  }

  /// Raises Error if the checkpoint does not fit.
  void check(const LoadOptions& options) const {
    if (loaded_.unverified && !options.allow_unverified()) {
      throw Error(c10::str(
          "shardwise: ", folder_.index().path, " has no ", files::kMarkerName,
          ": another program wrote it, so nothing of it can be verified, and allow_unverified(false) refuses "
          "that. Load a checkpoint that shardwise saved, or allow it."));
    }
    const bool strict = options.strict();
    std::string lines;
    if (strict) {
      lines = listed("missing in the checkpoint", loaded_.missing) +
              listed("neither in the module nor in the optimizer", loaded_.unexpected);
    }
    lines += listed("do not fit", wrong_);
    if (lines.empty()) return;
    throw Error(c10::str(
        "shardwise: the checkpoint ", folder_.index().path, " does not fit, and nothing was loaded:", lines,
        "\nGive the model, and an optimizer of the class, that were saved",
        strict ? ", or strict(false) to load the names that both have." : "."));
  }

  Loaded read() {
    for (const auto& [index, name] : found_) read_entry(module_.entries()[index], name);
    if (optimizer_) {
      optim::set_state(*optimizer_, parameters_, keys_, state_, [&](const auto& parameter, const auto& item) {
        return read_state(parameter, item);
      });
    }
    for (const auto& [name, saved] : folder_.index().tensors) {
      if (!name.starts_with(files::kProgram)) continue;
      loaded_.tensors.insert(name.substr(std::string(files::kProgram).size()), saves::read_whole(folder_, name));
    }
    for (const auto& [name, value] : folder_.index().values) read_value(name, value);
    return std::move(loaded_);
  }

 private:
  std::string why_not(const nn::ModuleState::Entry& entry, const files::SavedTensor& saved) const {
    if (saved.sizes != entry.sizes) {
      return c10::str("has shape ", files::text_of(entry.sizes), " here and ", files::text_of(saved.sizes), " there");
    }
    const auto dtype = entry.tensor.scalar_type();
    if (saved.dtype == dtype) return "";
    return c10::str(
        "is ", c10::getDtypeNames(dtype).first, " here and ", c10::getDtypeNames(saved.dtype).first,
        " there: cast the module before it is wrapped");
  }

  void match_module() {
    const auto& tensors = folder_.index().tensors;
    const auto& unknown = folder_.index().unknown;
    for (const auto& [name, index] : module_.names()) {
      if (const auto dtype = unknown.find(name); dtype != unknown.end()) {
        known_.insert(name);
        wrong_.push_back(c10::str("'", name, "' has the dtype ", dtype->second, " there, which torch does not have"));
      }
      const auto saved = tensors.find(name);
      if (saved == tensors.end()) continue;
      known_.insert(name);
      const auto reason = why_not(module_.entries()[index], saved->second);
      reason.empty() ? void(found_[index] = name) : wrong_.push_back(c10::str("'", name, "' ", reason));
    }
    for (const auto& [name, index] : module_.names()) {
      const auto& names = module_.entries()[index].names;
      const bool is_there = std::any_of(names.begin(), names.end(), [&](auto& each) { return known_.contains(each); });
      if (!is_there) loaded_.missing.push_back(name);
    }
  }

  /// Those of the checkpoint. Files have larger dtypes first, so what is read one after the other lies side by side.
  std::vector<std::string> optimizers_names() const {
    const auto& tensors = folder_.index().tensors;
    std::vector<std::string> names;
    for (const auto& [name, saved] : tensors) {
      if (name.starts_with(files::kOptimizer)) names.push_back(name);
    }
    const auto size = [&](const std::string& name) { return c10::elementSize(tensors.at(name).dtype); };
    std::stable_sort(names.begin(), names.end(), [&](auto& one, auto& other) { return size(one) > size(other); });
    return names;
  }

  // Of the tensors only their kinds are known yet, which take no memory.
  void match_optimizer(torch::optim::Optimizer& given) {
    optimizer_.emplace(given);
    parameters_ = optim::named_parameters(module_, *optimizer_);
    if (const auto problem = optim::without_name(parameters_, *optimizer_); !problem.empty()) throw ValueError(problem);
    const std::string prefix = files::kOptimizer;
    for (const auto& name : optimizers_names()) {
      const auto& saved = folder_.index().tensors.at(name);
      const bool is_small = files::Box::whole(saved.sizes).numel() <= 2;
      auto value = is_small ? saves::read_whole(folder_, name)
                            : at::zeros({}, at::TensorOptions(at::kCPU).dtype(saved.dtype)).expand(saved.sizes);
      state_.insert(name.substr(prefix.size()), std::move(value));
    }
    auto match = optim::match_state(parameters_, *optimizer_, state_);
    for (const auto& name : match.missing) loaded_.missing.push_back(prefix + name);
    for (const auto& line : match.wrong) wrong_.push_back("in the optimizer " + line);
    keys_.insert(match.keys.begin(), match.keys.end());
    for (const auto& key : match.keys) known_.insert(prefix + key);
    for (const auto& item : state_) {
      if (says_nothing_here(item.key(), item.value())) known_.insert(prefix + item.key());
    }
  }

  /// An option of Python's optimizers that is off, as `maximize`, is what optimizers do here; what a scheduler of
  /// Python's keeps among options is its own.
  static bool says_nothing_here(const std::string& key, const at::Tensor& value) {
    if (!key.starts_with("param_groups.")) return false;
    const bool is_off = value.scalar_type() == at::kBool && value.numel() == 1 && !value.item<bool>();
    return is_off || key.ends_with(".initial_lr");
  }

  void read_entry(const nn::ModuleState::Entry& entry, const std::string& name) {
    const auto values = saves::read_piece(folder_, saves::piece_like(entry, name, entry.tensor));
    const c10::InferenceMode no_inference(false);
    if (entry.copies != nullptr) return entry.copies->store_piece(entry.index, values);
    const c10::AutoGradMode no_grad(false);
    auto target = entry.tensor;
    target.copy_(values);
  }

  /// In the dtype in which it was saved; the optimizer casts it.
  at::Tensor read_state(const optim::NamedParameter& parameter, const optim::StateItem& item) {
    const auto name = files::kOptimizer + item.key;
    const auto kind = at::TensorOptions(at::kMeta).dtype(folder_.index().tensors.at(name).dtype);
    const auto like = at::empty(parameter.entry.tensor.sizes(), kind);
    return saves::read_piece(folder_, saves::piece_like(parameter.entry, name, like));
  }

  // Lists are another program's.
  void read_value(const std::string& name, const files::Json& value) {
    if (const auto* truth = value.as<bool>()) {
      loaded_.values[name] = *truth;
    } else if (const auto* whole = value.as<int64_t>()) {
      loaded_.values[name] = *whole;
    } else if (const auto* number = value.as<double>()) {
      loaded_.values[name] = *number;
    } else if (const auto* text = value.as<std::string>()) {
      loaded_.values[name] = *text;
    }
  }

  nn::ModuleState& module_;
  files::SavedFolder folder_;
  /// The names that are read, by entry of the module.
  std::map<size_t, std::string> found_;
  std::set<std::string> known_;
  std::vector<std::string> wrong_;
  std::optional<optim::OptimizerState> optimizer_;
  std::vector<optim::NamedParameter> parameters_;
  /// What the checkpoint has for the optimizer: the numbers, and of tensors their kinds.
  StateDict state_;
  std::set<std::string> keys_;
  Loaded loaded_;
};

Loaded load_all(
    const std::string& folder, torch::nn::Module& module, torch::optim::Optimizer* optimizer,
    const LoadOptions& options) {
  nn::ModuleState state(module);
  const auto ranks = saves::ranks_of(state, options.mesh(), "load");
  state.agree("load", state.locate());
  auto opened = saves::open_checkpoint(ranks, folder, options.entry());
  std::optional<Loading> loading;
  ranks.together([&] {
    loading.emplace(state, optimizer, std::move(opened));
    loading->check(options);
    return "";
  });
  Loaded loaded;
  ranks.together([&] {
    loaded = loading->read();
    return "";
  });
  return loaded;
}

} // namespace

Loaded load(const std::string& folder, torch::nn::Module& module, const LoadOptions& options) {
  return load_all(folder, module, nullptr, options);
}

Loaded load(
    const std::string& folder, torch::nn::Module& module, torch::optim::Optimizer& optimizer,
    const LoadOptions& options) {
  return load_all(folder, module, &optimizer, options);
}

} // namespace shardwise
