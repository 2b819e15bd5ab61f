#pragma once

#include <torch/nn/module.h>

namespace shardwise::nn {

/// RNN, LSTM and GRU hold a list of their parameters and nothing else, and to() makes it anew from the registry, where
/// the shards are (T07 in docs/coverage.md). So their shards keep the full leaves alive, and their operations, when
/// given shards, get the leaves.
bool is_recurrent(const torch::nn::Module& module);

} // namespace shardwise::nn
