#include "saves/save.h"

#include "base/compute_guard.h"
#include "files/merge.h"
#include "files/steps.h"
#include "saves/background_save.h"
#include "saves/module_pieces.h"
#include "saves/pieces.h"

#include <shardwise/error.h>
#include <shardwise/save.h>

#include <c10/util/StringUtil.h>

#include <utility>

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

/// What is wrong with a name of the module that would look like another part of a checkpoint; "" if none does.
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

} // namespace

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

void check_export(const Ranks& ranks, const std::string& file) {
  ranks.agree_on_place(file, "writes");
  ranks.together([&] {
    if (ranks.is_first()) files::check_file_place(files::Disk::real(), file);
    return "";
  });
}

void export_tensors(const Ranks& ranks, const std::string& file, const StateDict& whole) {
  ranks.together([&] {
    if (!ranks.is_first()) return "";
    const base::ComputeGuard guard;
    std::vector<at::Tensor> memory;
    std::vector<files::TensorToWrite> tensors;
    for (const auto& item : whole) {
      const auto& values = memory.emplace_back(item.value().detach().to(at::kCPU).contiguous());
      const files::Bytes data(static_cast<const std::byte*>(values.const_data_ptr()), values.nbytes());
      const auto box = files::Box::whole(values.sizes().vec());
      tensors.push_back({item.key(), values.scalar_type(), box, {data}});
    }
    files::write_whole_file(files::Disk::real(), file, tensors);
    return "";
  });
}

} // namespace shardwise::saves

namespace shardwise {
namespace {

void save_all(
    const std::string& folder, const torch::nn::Module& module, torch::optim::Optimizer* optimizer,
    const SaveOptions& options) {
  auto save = saves::module_save(module, optimizer, options);
  saves::save_pieces(save.ranks, files::Disk::real(), folder, save.pieces, std::move(save.about));
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

void export_safetensors(const std::string& file, const torch::nn::Module& module) {
  constexpr const char* kFunction = "export_safetensors";
  nn::ModuleState state(module);
  const auto ranks = saves::ranks_of(state, std::nullopt, kFunction);
  const auto problem = state.locate();
  state.agree(kFunction, problem.empty() ? saves::reserved_name(state, kFunction) : problem);
  saves::check_export(ranks, file);
  const auto whole = full_state_dict(module, FullStateDictOptions().rank0_only(true).cpu_offload(true));
  saves::export_tensors(ranks, file, whole);
}

struct AsyncSaver::State {
  void save(
      const std::string& folder, const torch::nn::Module& module, torch::optim::Optimizer* optimizer,
      const SaveOptions& options) {
    auto save = saves::module_save(module, optimizer, options);
    const auto beside = save.mesh ? saves::ranks_on_save_groups(*save.mesh) : saves::Ranks();
    in_background.begin(save.ranks, beside, files::Disk::real(), folder, save.pieces, std::move(save.about));
  }

  saves::BackgroundSave in_background;
};

AsyncSaver::AsyncSaver() : state_(std::make_unique<State>()) {}
AsyncSaver::AsyncSaver(AsyncSaver&&) noexcept = default;
AsyncSaver& AsyncSaver::operator=(AsyncSaver&&) noexcept = default;
AsyncSaver::~AsyncSaver() = default;

void AsyncSaver::save(const std::string& folder, const torch::nn::Module& module, const SaveOptions& options) {
  state_->save(folder, module, nullptr, options);
}

void AsyncSaver::save(
    const std::string& folder, const torch::nn::Module& module, torch::optim::Optimizer& optimizer,
    const SaveOptions& options) {
  state_->save(folder, module, &optimizer, options);
}

void AsyncSaver::wait() {
  state_->in_background.wait();
}

bool AsyncSaver::is_saving() const {
  return state_->in_background.is_under_way();
}

std::string step_folder(const std::string& root, int64_t step) {
  return files::step_path(root, step);
}

std::optional<SavedStep> newest_step(const std::string& root) {
  const auto newest = files::newest_step(files::Disk::real(), root);
  return newest ? std::optional(SavedStep{newest->step, newest->path}) : std::nullopt;
}

std::vector<std::string> keep_newest_steps(const std::string& root, int64_t count) {
  return files::keep_newest_steps(files::Disk::real(), root, count);
}

} // namespace shardwise
