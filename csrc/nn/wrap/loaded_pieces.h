#pragma once

namespace torch::nn {
class Module;
}

namespace shardwise::nn {

/// Raises Error if one of torch's modules, this one or below it, has only a piece of the weight that it was made for:
/// an archive of shards was loaded into it before it was wrapped. `function` is what is being called.
void refuse_loaded_pieces(const torch::nn::Module& module, const char* function);

} // namespace shardwise::nn
