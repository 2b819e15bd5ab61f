#pragma once

#include <torch/csrc/autograd/function.h>

#include <optional>

namespace shardwise::nn {

/// The part of autograd's graph that a function makes on this thread, from the construction of this object on.
/// It ends at edges: to parameters, which are nodes of the leaves, and to what was there before.
class InnerGraph {
 public:
  InnerGraph();

  /// Whether the gradient of the tensor goes into this part of the graph.
  bool made(const at::Tensor& tensor) const;
  /// The edges at which it ends, as reached from the outputs: each once, in an order that the graph alone decides.
  torch::autograd::edge_list ends(const torch::autograd::variable_list& outputs) const;

  /// Cuts it off: its gradients now arrive at edges of its own, which are returned, one for each of the ends given.
  /// Nothing, and an unspecified graph, when its ends are others. Of the first `optional` ends any may be missing.
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
