#include "saves/module_save.h"

#include "saves/module_pieces.h"
#include "saves/module_ranks.h"

#include <shardwise/error.h>

#include <c10/util/StringUtil.h>

namespace shardwise::saves {
namespace {

files::Json::Object json_of(const SavedValues& values) {
  files::Json::Object object;
  for (const auto& [name, value] : values) {
    object.push_back({name, std::visit([](const auto& each) { return files::Json(each); }, value)});
  }
  return object;
}

void add_optimizer(std::vector<Piece>& pieces, const nn::ModuleState& module, torch::optim::Optimizer& given) {
  const optim::OptimizerState optimizer(given);
  const auto parameters = optim::named_parameters(module, optimizer);
  if (const auto problem = optim::without_name(parameters, optimizer); !problem.empty()) throw ValueError(problem);
  auto kept = pieces_of(parameters, optimizer);
  pieces.insert(pieces.end(), std::make_move_iterator(kept.begin()), std::make_move_iterator(kept.end()));
}

} // namespace

std::string reserved_name(const nn::ModuleState& module, const std::string& function) {
  for (const auto& [name, index] : module.names()) {
    for (const std::string prefix : {files::kOptimizer, files::kProgram}) {
      if (!name.starts_with(prefix)) continue;
      return c10::str(
          "shardwise: ", function, "(): the module's '", name,
          "' cannot be told from what else a checkpoint has, since names with '", prefix,
          "' are for that. Rename the submodule, or save the modules in it to folders of their own.");
    }
  }
  return "";
}

ModuleSave module_save(
    const torch::nn::Module& module, torch::optim::Optimizer* optimizer, const SaveOptions& options) {
  nn::ModuleState state(module);
  ModuleSave save;
  save.mesh = mesh_of(state, options.mesh(), "save");
  save.ranks = ranks_of(state, options.mesh(), "save");
  const auto problem = state.locate();
  state.agree("save", problem.empty() ? reserved_name(state, "save") : problem);
  save.ranks.together([&] {
    save.pieces = pieces_of(state);
    if (optimizer != nullptr) add_optimizer(save.pieces, state, *optimizer);
    for (const auto& item : options.tensors())
      save.pieces.push_back(whole_piece(files::kProgram + item.key(), item.value(), /*must_agree=*/true));
    return "";
  });
  save.about.values = json_of(options.values());
  return save;
}

} // namespace shardwise::saves
