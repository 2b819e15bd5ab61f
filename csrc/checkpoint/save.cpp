#include <shardwise/save.h>

#include "checkpoint/module_pieces.h"
#include "checkpoint/module_ranks.h"
#include "checkpoint/save_pieces.h"

#include <shardwise/error.h>

#include <c10/util/StringUtil.h>

namespace shardwise {
namespace {

files::Json::Object json_of(const SavedValues& values) {
  files::Json::Object object;
  for (const auto& [name, value] : values) {
    object.push_back({name, std::visit([](const auto& each) { return files::Json(each); }, value)});
  }
  return object;
}

/// The module's own names must not look like others.
std::string reserved_name(const nn::ModuleState& module) {
  for (const auto& [name, index] : module.names()) {
    for (const std::string prefix : {checkpoint::kOptimizer, checkpoint::kProgram}) {
      if (!name.starts_with(prefix)) continue;
      return c10::str(
          "shardwise: save(): the module's '", name,
          "' cannot be told from what else a checkpoint has, since names with '", prefix,
          "' are for that. Rename the submodule, or save the modules in it to folders of their own.");
    }
  }
  return "";
}

void add_optimizer(
    std::vector<checkpoint::Piece>& pieces, const nn::ModuleState& module, torch::optim::Optimizer& given) {
  const optim::OptimizerState optimizer(given);
  const auto parameters = optim::named_parameters(module, optimizer);
  if (const auto problem = optim::without_name(parameters, optimizer); !problem.empty()) throw ValueError(problem);
  auto kept = checkpoint::pieces_of(parameters, optimizer);
  pieces.insert(pieces.end(), std::make_move_iterator(kept.begin()), std::make_move_iterator(kept.end()));
}

void save_all(
    const std::string& folder, const torch::nn::Module& module, torch::optim::Optimizer* optimizer,
    const SaveOptions& options) {
  nn::ModuleState state(module);
  const auto ranks = checkpoint::ranks_of(state, options.mesh(), "save");
  const auto problem = state.locate();
  state.agree("save", problem.empty() ? reserved_name(state) : problem);
  std::vector<checkpoint::Piece> pieces;
  ranks.together([&] {
    pieces = checkpoint::pieces_of(state);
    if (optimizer != nullptr) add_optimizer(pieces, state, *optimizer);
    for (const auto& item : options.tensors()) {
      pieces.push_back(checkpoint::whole_piece(checkpoint::kProgram + item.key(), item.value()));
    }
    return "";
  });
  files::Marker about;
  about.values = json_of(options.values());
  checkpoint::save_pieces(ranks, files::Disk::real(), folder, pieces, std::move(about));
}

} // namespace

void save(const std::string& folder, const torch::nn::Module& module, const SaveOptions& options) {
  save_all(folder, module, nullptr, options);
}

void save(
    const std::string& folder, const torch::nn::Module& module, torch::optim::Optimizer& optimizer,
    const SaveOptions& options) {
  save_all(folder, module, &optimizer, options);
}

} // namespace shardwise
