#include "pipeline/backward_halves.h"

#include <c10/core/StreamGuard.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <memory>
#include <string>
#include <unordered_set>

namespace shardwise::pipeline {

namespace autograd = torch::autograd;
using autograd::Edge;
using autograd::edge_list;
using Tensors = BackwardHalves::Tensors;

namespace {

/// Visits all operations that these edges lead to, each once, after all that it leads to itself.
template <typename Act>
void for_each_below(const edge_list& roots, const Act& act) {
  struct Step {
    const Edge& edge;
    size_t next = 0;
  };
  std::unordered_set<const autograd::Node*> seen;
  std::vector<Step> way;
  const auto go_to = [&](const Edge& edge) {
    if (edge.is_valid() && seen.insert(edge.function.get()).second) way.push_back({edge});
  };
  for (const auto& root : roots) {
    go_to(root);
    while (!way.empty()) {
      const auto& node = way.back().edge.function;
      if (way.back().next < node->num_outputs()) {
        go_to(node->next_edge(way.back().next++));
      } else {
        act(node);
        way.pop_back();
      }
    }
  }
}

bool has_valid(const edge_list& edges) {
  return std::any_of(edges.begin(), edges.end(), [](const Edge& edge) { return edge.is_valid(); });
}

/// The ends of all ways from these edges: what accumulates gradients.
edge_list ends_of(const edge_list& roots) {
  edge_list ends;
  for_each_below(roots, [&](const auto& node) {
    if (!has_valid(node->next_edges())) ends.emplace_back(node, 0);
  });
  return ends;
}

} // namespace

/// The operations that lead to the inputs.
struct BackwardHalves::Paths {
  Paths(const edge_list& roots, const Tensors& inputs) {
    for (const auto& input : inputs) {
      if (const auto leaf = autograd::impl::try_get_grad_accumulator(input)) to_inputs.insert(leaf.get());
    }
    for_each_below(roots, [&](const Node& node) {
      const auto& next = node->next_edges();
      if (std::none_of(next.begin(), next.end(), [&](const Edge& edge) { return lead_there(edge); })) return;
      to_inputs.insert(node.get());
      edge_list elsewhere;
      for (const auto& edge : next) elsewhere.push_back(lead_there(edge) ? Edge() : edge);
      if (has_valid(elsewhere)) {
        forks.push_back({node, {}, std::move(elsewhere)});
      } else {
        on_the_way.push_back(node);
      }
    });
  }
  bool lead_there(const Edge& edge) const {
    return to_inputs.contains(edge.function.get());
  }

  std::unordered_set<const autograd::Node*> to_inputs;
  /// Those that lead to inputs alone.
  std::vector<Node> on_the_way;
  std::vector<Fork> forks;
};

/// While it lives, gradients that arrive at forks are stored, as their hooks leave them.
class BackwardHalves::CaptureAtForks {
 public:
  explicit CaptureAtForks(std::vector<Fork>& forks) : forks_(forks) {
    for (auto& fork : forks_) {
      fork.node->add_pre_hook(std::make_unique<Hook>(fork.arrived));
      hooks_.push_back(fork.node->pre_hooks().back().get());
    }
  }
  CaptureAtForks(const CaptureAtForks&) = delete;
  CaptureAtForks& operator=(const CaptureAtForks&) = delete;
  ~CaptureAtForks() {
    for (size_t i = 0; i < hooks_.size(); ++i) {
      std::erase_if(forks_[i].node->pre_hooks(), [&](const auto& hook) { return hook.get() == hooks_[i]; });
    }
  }

 private:
  class Hook final : public autograd::FunctionPreHook {
   public:
    explicit Hook(Tensors& arrived) : arrived_(arrived) {}
    autograd::variable_list operator()(const autograd::variable_list& gradients) override {
      return arrived_ = gradients;
    }

   private:
    Tensors& arrived_;
  };

  std::vector<Fork>& forks_;
  std::vector<const autograd::FunctionPreHook*> hooks_;
};

/// Runs a fork's operation once more, and lets its gradients go elsewhere alone. Since the ways to the inputs are not
/// part of this backward, the operation does not compute what would go there.
class BackwardHalves::RerunFork final : public autograd::Node {
 public:
  explicit RerunFork(Fork fork)
      : autograd::Node(fork.node->sequence_nr(), std::move(fork.elsewhere)),
        node_(std::move(fork.node)) {
    // An operation runs on the stream that is current when it learns of its inputs.
    const c10::OptionalStreamGuard guard(node_->stream());
    for (const auto& gradient : fork.arrived) {
      gradient.defined() ? add_input_metadata(gradient) : add_input_metadata(undefined_input());
    }
  }
  std::string name() const override {
    return node_->name();
  }
  autograd::variable_list apply(autograd::variable_list&& gradients) override {
    auto results = (*node_)(std::move(gradients));
    results.resize(num_outputs());
    for (size_t i = 0; i < results.size(); ++i) {
      if (!next_edge(i).is_valid()) results[i].reset();
    }
    return results;
  }
  void release_variables() override {
    node_->release_variables();
  }

 private:
  BackwardHalves::Node node_;
};

// If an operation leads to inputs alone, the second half does not need what it saved for its backward.
Tensors BackwardHalves::input_gradients(const Tensors& inputs) {
  if (outputs_.empty() || inputs.empty()) return Tensors(inputs.size());
  const auto find = [&] {
    return autograd::grad(outputs_, inputs, gradients_, /*retain_graph=*/true, false, /*allow_unused=*/true);
  };
  if (repeats_) return find();
  edge_list roots;
  for (const auto& output : outputs_) roots.push_back(autograd::impl::gradient_edge(output));
  Paths paths(roots, inputs);
  // Such a hook may change what goes to either half.
  if (std::any_of(
          paths.forks.begin(), paths.forks.end(), [](const Fork& fork) { return !fork.node->post_hooks().empty(); }))
    return find();
  forks_ = std::move(paths.forks);
  auto found = [&] {
    const CaptureAtForks capture(forks_);
    return find();
  }();
  for (const auto& node : paths.on_the_way) node->release_variables();
  for (size_t i = 0; i < roots.size(); ++i) {
    if (paths.lead_there(roots[i])) continue;
    others_.push_back(roots[i]);
    gradients_of_others_.push_back(gradients_[i]);
  }
  outputs_.clear();
  gradients_.clear();
  return found;
}

void BackwardHalves::accumulate_parameter_gradients() {
  if (!outputs_.empty()) return autograd::backward(outputs_, gradients_);
  auto roots = std::move(others_);
  auto gradients = std::move(gradients_of_others_);
  for (auto& fork : std::exchange(forks_, {})) {
    const auto arrived = fork.arrived;
    const Node again = base::make_node<RerunFork>(std::move(fork));
    for (size_t i = 0; i < arrived.size(); ++i) {
      if (!arrived[i].defined()) continue;
      roots.emplace_back(again, static_cast<uint32_t>(i));
      gradients.push_back(arrived[i]);
    }
  }
  if (roots.empty()) return;
  autograd::Engine::get_default_engine().execute(
      roots, gradients, /*keep_graph=*/false, /*create_graph=*/false, /*accumulate_grad=*/true, ends_of(roots));
}

} // namespace shardwise::pipeline
