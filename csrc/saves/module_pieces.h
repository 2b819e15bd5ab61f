#pragma once

#include "files/names.h"
#include "nn/state/module_state.h"
#include "optim/optimizer_state.h"
#include "saves/division.h"

#include <string>
#include <vector>

namespace shardwise::saves {

/// `values` as this rank's piece of something that lies as a tensor of a module does.
Piece piece_like(const nn::ModuleState::Entry& entry, std::string name, at::Tensor values);

/// A tensor that each rank has whole. `must_agree` is Piece's.
Piece whole_piece(std::string name, at::Tensor values, bool must_agree = false);

/// The parameters and buffers of a module, under all their names.
std::vector<Piece> pieces_of(const nn::ModuleState& module);

/// The state of an optimizer for parameters of a module, and the options of their groups.
std::vector<Piece> pieces_of(
    const std::vector<optim::NamedParameter>& parameters, const optim::OptimizerState& optimizer);

} // namespace shardwise::saves
