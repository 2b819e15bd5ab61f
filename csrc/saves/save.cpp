#include <shardwise/save.h>

#include "saves/module_save.h"
#include "saves/save_pieces.h"

#include <utility>

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

} // namespace shardwise
