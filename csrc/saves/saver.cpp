#include <shardwise/saver.h>

#include "saves/background_save.h"
#include "saves/mesh_ranks.h"
#include "saves/module_save.h"

namespace shardwise {

struct Saver::State {
  void save(
      const std::string& folder, const torch::nn::Module& module, torch::optim::Optimizer* optimizer,
      const SaveOptions& options) {
    auto save = saves::module_save(module, optimizer, options);
    const auto beside = save.mesh ? saves::ranks_beside(*save.mesh) : saves::Ranks();
    in_background.begin(save.ranks, beside, files::Disk::real(), folder, save.pieces, std::move(save.about));
  }

  saves::BackgroundSave in_background;
};

Saver::Saver() : state_(std::make_unique<State>()) {}
Saver::Saver(Saver&&) noexcept = default;
Saver& Saver::operator=(Saver&&) noexcept = default;
Saver::~Saver() = default;

void Saver::save(const std::string& folder, const torch::nn::Module& module, const SaveOptions& options) {
  state_->save(folder, module, nullptr, options);
}

void Saver::save(
    const std::string& folder, const torch::nn::Module& module, torch::optim::Optimizer& optimizer,
    const SaveOptions& options) {
  state_->save(folder, module, &optimizer, options);
}

void Saver::wait() {
  state_->in_background.wait();
}

bool Saver::is_saving() const {
  return state_->in_background.is_under_way();
}

} // namespace shardwise
