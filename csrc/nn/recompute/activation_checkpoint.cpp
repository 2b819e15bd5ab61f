#include "base/caller.h"
#include "base/torch_versions.h"
#include "nn/recompute/inner_graph.h"
#include "nn/recompute/thread_state.h"

#include <shardwise/activation_checkpoint.h>
#include <shardwise/error.h>

#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>
#include <c10/util/StringUtil.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/saved_variable.h>

#include <algorithm>
#include <mutex>
#include <unordered_map>
#include <unordered_set>

namespace shardwise::detail {
namespace {

using torch::autograd::AccumulateGrad;
using torch::autograd::Edge;
using torch::autograd::edge_list;
using torch::autograd::Node;
using torch::autograd::impl::gradient_edge;

/// One run of an activation checkpoint's function, on aliases of the inputs at which its graph begins.
struct ActivationCheckpointRun {
  ActivationCheckpointRun(ActivationCheckpointFunction& fn, const Tensors& inputs) {
    for (const auto& input : inputs) {
      aliases.push_back(input.defined() ? input.detach().set_requires_grad(input.requires_grad()) : input);
    }
    outputs = fn(aliases);
  }

  nn::InnerGraph graph;
  Tensors aliases;
  Tensors outputs;
};

/// Stands for everything that the function put into the graph. Its edges lead to the inputs, and to where that part of
/// the graph ended; in backward it runs the function again to have that part back.
class ActivationCheckpointNode : public Node {
 public:
  /// To be made before the first run: the second one starts from the autocast and random state of now.
  ActivationCheckpointNode(std::shared_ptr<ActivationCheckpointFunction> fn, const ActivationCheckpointOptions& options)
      : fn_(std::move(fn)),
        autocast_(nn::AutocastState::now().without_cache()),
        keeps_random_state_(options.preserve_rng_state()) {}

  /// Makes the first run, and keeps what the second one is compared with.
  ActivationCheckpointRun run(const Tensors& inputs) {
    if (keeps_random_state_) random_ = nn::RandomState::now(inputs);
    // Saved before the run, so that a function that changes an input is noticed.
    for (const auto& input : inputs) inputs_.emplace_back(input, false);
    const nn::StateGuard autocast(autocast_);
    ActivationCheckpointRun run(*fn_, inputs);
    outputs_ = outputs_of(run);

    edge_list edges;
    edge_list own;
    std::unordered_set<const Node*> own_nodes;
    for (size_t i = 0; i < inputs.size(); ++i) {
      edges.push_back(inputs[i].defined() ? gradient_edge(inputs[i]) : Edge());
      own.push_back(inputs[i].defined() ? gradient_edge(run.aliases[i]) : Edge());
      own_nodes.insert(own.back().function.get());
    }
    for (auto& end : run.graph.ends(run.outputs)) {
      if (!own_nodes.contains(end.function.get())) ends_.push_back(std::move(end));
    }
    edges.insert(edges.end(), ends_.begin(), ends_.end());
    set_next_edges(std::move(edges));
    return run;
  }

  std::string name() const override {
    return "shardwise::ActivationCheckpoint";
  }

  Tensors apply(Tensors&& gradients) override {
    return base::called_by_torch([&] { return gradients_of_inputs(std::move(gradients)); });
  }

  void release_variables() override {
    const std::lock_guard lock(mutex_);
    fn_.reset();
    inputs_.clear();
  }

 private:
  struct Output {
    bool defined = false;
    /// Whether its gradient arrives at this node.
    bool made = false;
    at::ScalarType dtype = at::ScalarType::Undefined;
    at::Device device = at::kCPU;
    std::vector<int64_t> sizes = {};

    bool operator==(const Output&) const = default;
    std::string text() const {
      if (!defined) return "undefined";
      return c10::str(
          dtype, " of sizes ", at::IntArrayRef(sizes), " on ", device, made ? " with" : " without", " a gradient");
    }
  };

  static std::vector<Output> outputs_of(const ActivationCheckpointRun& run) {
    std::vector<Output> outputs;
    for (const auto& output : run.outputs) {
      auto& kept = outputs.emplace_back();
      if (!output.defined()) continue;
      kept = {true, run.graph.made(output), output.scalar_type(), output.device(), output.sizes().vec()};
    }
    return outputs;
  }

  ActivationCheckpointRun run_again() {
    std::shared_ptr<ActivationCheckpointFunction> fn;
    Tensors inputs;
    {
      const std::lock_guard lock(mutex_);
      if (!fn_) {
        throw Error(
            "shardwise: a second backward ran through an activation checkpoint after the first one had freed what it "
            "needs. Pass retain_graph=true to every backward but the last.");
      }
      fn = fn_;
      for (const auto& input : inputs_) inputs.push_back(input.unpack());
    }
    const c10::InferenceMode no_inference(false);
    const c10::AutoGradMode with_gradients(true);
    const nn::StateGuard autocast(autocast_);
    std::optional<nn::StateGuard<nn::RandomState>> random;
    if (random_) random.emplace(*random_);
    return {*fn, inputs};
  }

  void compare(const ActivationCheckpointRun& run) const {
    constexpr auto* kRule = " The function must do the same both times: it may not depend on what has changed since.";
    const auto now = outputs_of(run);
    if (now.size() != outputs_.size()) {
      throw Error(c10::str(
          "shardwise: the function of an activation checkpoint returned ", outputs_.size(), " outputs in forward, and ",
          now.size(), " when it ran again in backward.", kRule));
    }
    for (size_t i = 0; i < now.size(); ++i) {
      if (now[i] == outputs_[i]) continue;
      throw Error(c10::str(
          "shardwise: output ", i, " of the function of an activation checkpoint was ", outputs_[i].text(),
          " in forward, and ", now[i].text(), " when it ran again in backward.", kRule));
    }
  }

  Tensors gradients_of_inputs(Tensors gradients) {
    if (c10::GradMode::is_enabled()) {
      throw Error(
          "shardwise: an activation checkpoint does not support gradients of gradients (backward with create_graph). "
          "Call its function directly, without activation_checkpoint(), there.");
    }
    Tensors results(num_outputs());
    if (std::none_of(gradients.begin(), gradients.end(), [](const auto& gradient) { return gradient.defined(); })) {
      return results;
    }
    auto run = run_again();
    compare(run);

    edge_list ends;
    for (const auto& alias : run.aliases) ends.push_back(alias.defined() ? gradient_edge(alias) : Edge());
    const auto inputs = ends.size();
    ends.insert(ends.end(), ends_.begin(), ends_.end());
    // If the graph were not cut, hooks of parameters would fire in here and once more outside, and gradients would run
    // on into the graph before the activation checkpoint.
    const auto sinks = run.graph.cut(run.outputs, ends, inputs);
    if (!sinks) {
      throw Error(
          "shardwise: the function of an activation checkpoint used other parameters, or other tensors that require a "
          "gradient, when it ran again in backward than in forward, so some gradients would be lost. Do not freeze or "
          "replace parameters in between, and make the function do the same both times.");
    }

    edge_list roots;
    Tensors root_gradients;
    for (size_t i = 0, ours = 0; i < outputs_.size(); ++i) {
      if (!outputs_[i].made) continue;
      auto& gradient = gradients[ours++];
      if (!gradient.defined()) continue;
      roots.push_back(gradient_edge(run.outputs[i]));
      root_gradients.push_back(std::move(gradient));
    }
    run.outputs.clear();

    edge_list wanted;
    std::vector<size_t> positions;
    for (size_t i = 0; i < sinks->size(); ++i) {
      if (!(*sinks)[i].is_valid() || !task_should_compute_output(i)) continue;
      wanted.push_back((*sinks)[i]);
      positions.push_back(i);
    }
    if (wanted.empty()) return results;
    auto found = torch::autograd::Engine::get_default_engine().execute(
        roots, root_gradients, /*keep_graph=*/false, /*create_graph=*/false, /*accumulate_grad=*/false, wanted);
    for (size_t i = 0; i < positions.size(); ++i) results[positions[i]] = std::move(found[i]);
    return results;
  }

  std::shared_ptr<ActivationCheckpointFunction> fn_;
  nn::AutocastState autocast_;
  const bool keeps_random_state_;
  std::optional<nn::RandomState> random_;
  std::vector<torch::autograd::SavedVariable> inputs_;
  /// Where the first run's part of the graph ended, apart from the inputs. next_edges() will not do: an activation
  /// checkpoint around this one changes those when it cuts off its own part.
  edge_list ends_;
  std::vector<Output> outputs_;
};

/// How many tensors lie in each piece of memory. A change in place of an output would change all of them.
std::unordered_map<const c10::StorageImpl*, int> count_in_memory(
    const ActivationCheckpointRun& run, const edge_list& edges) {
  std::unordered_map<const c10::StorageImpl*, int> counts;
  const auto add = [&](const at::Tensor& tensor) {
    if (tensor.defined() && tensor.has_storage()) ++counts[tensor.storage().unsafeGetStorageImpl()];
  };
  for (const auto& alias : run.aliases) add(alias);
  for (const auto& output : run.outputs) add(output);
  for (const auto& edge : edges) {
    if (const auto* leaf = dynamic_cast<const AccumulateGrad*>(edge.function.get())) add(leaf->variable);
  }
  return counts;
}

} // namespace

Tensors activation_checkpoint(
    const ActivationCheckpointOptions& options, ActivationCheckpointFunction fn, const Tensors& inputs) {
  if (!c10::GradMode::is_enabled() || c10::InferenceMode::is_enabled()) return fn(inputs);
  const auto node =
      base::make_node<ActivationCheckpointNode>(std::make_shared<ActivationCheckpointFunction>(std::move(fn)), options);
  const auto run = node->run(inputs);

  auto counts = count_in_memory(run, node->next_edges());
  Tensors outputs;
  for (const auto& output : run.outputs) {
    if (run.graph.made(output)) {
      // Autograd must not take the result for a view in the graph that is dropped now, nor may a change in place of it
      // change another tensor unseen.
      const c10::AutoGradMode no_grad(false);
      auto ours = output.detach();
      const bool views_captured = output.is_view() && !run.graph.made(at::Tensor(output._base()));
      const bool has_others = output.has_storage() && counts[output.storage().unsafeGetStorageImpl()] > 1;
      if (has_others || views_captured) ours = ours.clone();
      torch::autograd::create_gradient_edge(ours, node);
      outputs.push_back(std::move(ours));
    } else {
      // The input itself, if the function returned it as it is.
      const auto alias = std::find_if(run.aliases.begin(), run.aliases.end(), [&](const auto& one) {
        return output.defined() && output.is_same(one);
      });
      outputs.push_back(alias == run.aliases.end() ? output : inputs[alias - run.aliases.begin()]);
    }
  }
  return outputs;
}

} // namespace shardwise::detail
