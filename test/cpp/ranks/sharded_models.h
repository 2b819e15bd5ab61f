#pragma once

// What the tests of fully_shard share: a model is compared with a plain one in the same process.
#include "ranks/models.h"

namespace shardwise::test {

inline FullyShardOptions sharded_on(Rank& rank) {
  return FullyShardOptions().mesh(rank.mesh());
}

inline std::optional<int64_t> last_dimension(const std::string&, const torch::Tensor& parameter) {
  return parameter.dim() - 1;
}

/// This rank's piece of a whole tensor in the layout `rows`: what torch.chunk gives, or nothing. Dimension -1: all.
/// On a mesh of two axes there are fewer shards than ranks.
inline torch::Tensor piece_of(const torch::Tensor& whole, const Rank& rank, int64_t dim = 0, int64_t shards = 0) {
  if (dim < 0) return whole;
  if (shards == 0) shards = rank.world_size();
  const auto size = whole.size(dim);
  const auto chunk = (size + shards - 1) / shards;
  const auto start = std::min(rank.rank() % shards * chunk, size);
  return whole.narrow(dim, start, std::min(chunk, size - start));
}

/// The dict of a plain module, made without the function that is tested.
inline std::map<std::string, torch::Tensor> plain_state(const torch::nn::Module& module) {
  std::map<std::string, torch::Tensor> state;
  for (const auto& entry : module.named_parameters()) state[entry.key()] = entry.value().detach().clone();
  for (const auto& entry : module.named_buffers()) state[entry.key()] = entry.value().clone();
  return state;
}

inline void assert_state(
    const StateDict& ours, const std::map<std::string, torch::Tensor>& expected, const std::string& what) {
  ASSERT_EQ(ours.size(), expected.size()) << what;
  for (const auto& [name, value] : expected) {
    ASSERT_NE(ours.find(name), nullptr) << what << ": " << name;
    assert_close(ours[name], value, what + ": " + name);
    ASSERT_FALSE(ours[name].requires_grad()) << name;
  }
}

using Dims = std::map<std::string, int64_t>;

/// Shards and their gradients are the pieces of the reference's.
inline void assert_pieces(
    const torch::nn::Module& model, const torch::nn::Module& reference, const Rank& rank, const std::string& what,
    const Dims& dims = {}, int64_t shards = 0, Compare compare = assert_close) {
  const auto expected = reference.named_parameters();
  const auto ours = model.named_parameters();
  ASSERT_EQ(ours.keys(), expected.keys()) << what;
  for (const auto& entry : ours) {
    const auto dim = dims.contains(entry.key()) ? dims.at(entry.key()) : 0;
    const auto text = what + ": " + entry.key() + " on " + rank.name();
    const auto& whole = expected[entry.key()];
    compare(entry.value(), piece_of(whole.detach(), rank, dim, shards), text);
    ASSERT_EQ(entry.value().grad().defined(), whole.grad().defined()) << "gradient of " << text;
    if (whole.grad().defined())
      compare(entry.value().grad(), piece_of(whole.grad(), rank, dim, shards), "gradient of " + text);
  }
}

} // namespace shardwise::test
