#pragma once

namespace torch::nn {
class Module;
}

namespace shardwise::nn {

/// Raises Error when a module of torch's below this one has a piece of the weight that it was made for: an archive of
/// shards was loaded into it before it was wrapped. `function` is what is called on it now.
void refuse_loaded_pieces(const torch::nn::Module& module, const char* function);

} // namespace shardwise::nn
