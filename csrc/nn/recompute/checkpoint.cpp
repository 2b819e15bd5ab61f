#include <shardwise/checkpoint.h>

#include "base/torch_versions.h"
#include "nn/recompute/checkpoint_node.h"

#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>

#include <unordered_map>

namespace shardwise::detail {
namespace {

using torch::autograd::AccumulateGrad;

/// Counts the tensors in each piece of memory, all of which a change in place of an output would change.
class SharedMemory {
 public:
  SharedMemory(const nn::CheckpointRun& run, const torch::autograd::edge_list& edges) {
    for (const auto& alias : run.aliases) add(alias);
    for (const auto& output : run.outputs) add(output);
    for (const auto& edge : edges) {
      if (const auto* leaf = dynamic_cast<const AccumulateGrad*>(edge.function.get())) add(leaf->variable);
    }
  }
  bool has_others(const at::Tensor& output) const {
    const auto found = output.has_storage() ? uses_.find(output.storage().unsafeGetStorageImpl()) : uses_.end();
    return found != uses_.end() && found->second > 1;
  }

 private:
  void add(const at::Tensor& tensor) {
    if (tensor.defined() && tensor.has_storage()) ++uses_[tensor.storage().unsafeGetStorageImpl()];
  }
  std::unordered_map<const c10::StorageImpl*, int> uses_;
};

/// Whether the tensor is a view of one that the function captured.
bool views_captured(const nn::CheckpointRun& run, const at::Tensor& output) {
  return output.is_view() && !run.graph.made(at::Tensor(output._base()));
}

/// The input that the function returned as it is, or null.
const at::Tensor* returned_input(const nn::CheckpointRun& run, const Tensors& inputs, const at::Tensor& output) {
  for (size_t i = 0; i < inputs.size(); ++i) {
    if (output.defined() && output.is_same(run.aliases[i])) return &inputs[i];
  }
  return nullptr;
}

} // namespace

Tensors checkpoint(const CheckpointOptions& options, CheckpointFunction fn, const Tensors& inputs) {
  if (!c10::GradMode::is_enabled() || c10::InferenceMode::is_enabled()) return fn(inputs);
  const auto node = base::make_node<nn::CheckpointNode>(std::make_shared<CheckpointFunction>(std::move(fn)), options);
  const auto run = node->run(inputs);

  const SharedMemory memory(run, node->next_edges());
  Tensors outputs;
  for (const auto& output : run.outputs) {
    if (run.graph.made(output)) {
      // Autograd must not take the result for a view in the graph that is dropped now, nor may a change in place of it
      // change another tensor unseen.
      const c10::AutoGradMode no_grad(false);
      auto ours = output.detach();
      if (memory.has_others(output) || views_captured(run, output)) ours = ours.clone();
      torch::autograd::create_gradient_edge(ours, node);
      outputs.push_back(std::move(ours));
    } else {
      const auto* input = returned_input(run, inputs, output);
      outputs.push_back(input != nullptr ? *input : output);
    }
  }
  return outputs;
}

} // namespace shardwise::detail
