#include "nn/recompute/inner_graph.h"

#include "base/torch_versions.h"

#include <ATen/SequenceNumber.h>
#include <ATen/record_function.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/variable.h>

#include <map>
#include <set>
#include <unordered_set>

namespace shardwise::nn {
namespace {

using torch::autograd::AccumulateGrad;
using torch::autograd::Edge;
using torch::autograd::edge_list;
using torch::autograd::Node;
using torch::autograd::variable_list;
using torch::autograd::impl::gradient_edge;

/// A node at which a gradient arrives and is picked up; never executed.
class Sink : public Node {
 public:
  using Node::Node;
  std::string name() const override {
    return "shardwise::Sink";
  }
  variable_list apply(variable_list&&) override {
    return {};
  }
};

Edge sink_in_place_of(const Edge& end) {
  auto sink = base::make_node<Sink>();
  const auto& metadata = end.function->input_metadata(end.input_nr);
  sink->add_input_metadata(
      metadata.options(), metadata.shape_as_dim_vector(), metadata.is_tensor_subclass(), metadata.is_nested_tensor(),
      metadata.grad_dtype());
  return {std::move(sink), 0};
}

using Key = std::pair<const Node*, uint32_t>;

Key key_of(const Edge& edge) {
  return {edge.function.get(), edge.input_nr};
}

} // namespace

InnerGraph::InnerGraph() : thread_(at::RecordFunction::currentThreadId()), first_(at::sequence_number::peek()) {}

bool InnerGraph::made(const Node& node) const {
  // The sequence number alone will not do: each thread counts its own, and nodes of leaves have the highest one.
  return node.thread_id() == thread_ && node.sequence_nr() >= first_ &&
         dynamic_cast<const AccumulateGrad*>(&node) == nullptr;
}

bool InnerGraph::made(const at::Tensor& tensor) const {
  if (!tensor.defined() || !tensor.requires_grad()) return false;
  const auto edge = gradient_edge(tensor);
  return edge.is_valid() && made(*edge.function);
}

template <typename Visit>
void InnerGraph::for_each_end(const variable_list& outputs, const Visit& visit) const {
  std::unordered_set<const Node*> seen;
  std::vector<Node*> open;
  const auto enter = [&](Node* node) {
    if (seen.insert(node).second) open.push_back(node);
  };
  for (const auto& output : outputs) {
    if (made(output)) enter(gradient_edge(output).function.get());
  }
  while (!open.empty()) {
    auto* node = open.back();
    open.pop_back();
    for (auto& edge : node->next_edges()) {
      if (!edge.is_valid()) continue;
      if (made(*edge.function)) {
        enter(edge.function.get());
      } else {
        visit(edge);
      }
    }
  }
}

edge_list InnerGraph::ends(const variable_list& outputs) const {
  edge_list ends;
  std::set<Key> seen;
  for_each_end(outputs, [&](const Edge& edge) {
    if (seen.insert(key_of(edge)).second) ends.push_back(edge);
  });
  return ends;
}

std::optional<edge_list> InnerGraph::cut(const variable_list& outputs, const edge_list& ends, size_t optional) const {
  struct End {
    Edge sink;
    bool reached;
  };
  std::map<Key, End> sinks;
  edge_list result;
  for (const auto& end : ends) {
    result.push_back(end.is_valid() ? sink_in_place_of(end) : Edge());
    if (end.is_valid()) sinks[key_of(end)] = {result.back(), result.size() <= optional};
  }
  bool known = true;
  // A sink has no edges of its own, so the topological numbers of the nodes before it stay valid.
  for_each_end(outputs, [&](Edge& edge) {
    const auto found = sinks.find(key_of(edge));
    if (found == sinks.end()) {
      known = false;
      return;
    }
    found->second.reached = true;
    edge = found->second.sink;
  });
  for (const auto& [key, end] : sinks) known = known && end.reached;
  return known ? std::optional(std::move(result)) : std::nullopt;
}

} // namespace shardwise::nn
