#pragma once

#include <shardwise/hooks.h>

namespace shardwise::nn {

/// Raises ValueError if a hook has added or dropped tensors.
void require_count(const HookTensors& tensors, size_t count, const char* kind, const torch::nn::Module& module);

} // namespace shardwise::nn
