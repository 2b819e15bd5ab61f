#pragma once

#include <torch/csrc/autograd/function.h>

#include <optional>

namespace shardwise::nn {

/// The part of autograd's graph that a function makes on this thread, from the construction of this object on. It ends
/// in edges to nodes that are not part of it: those of leaves, and those that existed before.
class InnerGraph {
 public:
  InnerGraph();

  /// Whether the gradient of this tensor enters this part of the graph.
  bool made(const at::Tensor& tensor) const;
  /// The edges in which it ends, as reached from the outputs: each once, in an order that depends on the graph alone.
  torch::autograd::edge_list ends(const torch::autograd::variable_list& outputs) const;

  /// Cuts it off: its gradients now arrive at new edges, which are returned, one for each of the given ends. If it has
  /// other ends, returns nothing and leaves the graph in an unspecified state. Any of the first `optional` ends may be
  /// missing.
  std::optional<torch::autograd::edge_list> cut(
      const torch::autograd::variable_list& outputs, const torch::autograd::edge_list& ends, size_t optional) const;

 private:
  bool made(const torch::autograd::Node& node) const;
  template <typename Visit>
  void for_each_end(const torch::autograd::variable_list& outputs, const Visit& visit) const;

  uint64_t thread_;
  uint64_t first_;
};

} // namespace shardwise::nn
