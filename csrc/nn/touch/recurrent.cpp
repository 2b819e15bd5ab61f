#include "nn/touch/recurrent.h"

#include "engine/front_end.h"
#include "nn/touch/touch.h"

#include <ATen/core/List.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>
#include <torch/nn/modules/rnn.h>

namespace shardwise::nn {
namespace {

/// The full leaf of a shard; undefined for any other tensor.
at::Tensor leaf_of(const at::Tensor& tensor) {
  const auto unit = engine::unit_of_shard(tensor);
  return unit ? unit->parameter_of_shard(tensor)->leaf() : at::Tensor();
}

size_t index_of(const c10::OperatorHandle& operation, const char* argument) {
  return static_cast<size_t>(operation.schema().argumentIndexWithName(argument).value());
}

void run_recurrent(const c10::OperatorHandle& operation, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  const auto count = operation.schema().arguments().size();
  auto& weights = torch::jit::peek(*stack, index_of(operation, "params"), count);
  c10::List<at::Tensor> used;
  for (const at::Tensor& weight : weights.toTensorVector()) {
    const auto leaf = leaf_of(weight);
    used.push_back(leaf.defined() ? leaf : weight);
  }
  weights = used;
  run_touched(operation, keys, stack);
}

/// cuDNN wants its weights in one piece of memory. Shards and full leaves stay in memory of their own, so this does
/// nothing for them.
void run_flatten(const c10::OperatorHandle& operation, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  const auto count = operation.schema().arguments().size();
  const auto weights = torch::jit::peek(*stack, index_of(operation, "weight_arr"), count).toTensorVector();
  if (weights.empty() || !leaf_of(weights.front()).defined()) return run_touched(operation, keys, stack);
  const auto nothing = at::empty({0}, weights.front().options().requires_grad(false));
  torch::jit::drop(*stack, count);
  stack->emplace_back(nothing);
}

} // namespace

bool is_recurrent(const torch::nn::Module& module) {
  return module.as<torch::nn::LSTMImpl>() != nullptr || module.as<torch::nn::GRUImpl>() != nullptr ||
         module.as<torch::nn::RNNImpl>() != nullptr;
}

TORCH_LIBRARY_IMPL(aten, DeferredInit, library) {
  for (const char* name :
       {"lstm.input", "lstm.data", "gru.input", "gru.data", "rnn_tanh.input", "rnn_tanh.data", "rnn_relu.input",
        "rnn_relu.data"}) {
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&run_recurrent>());
  }
  library.impl("_cudnn_rnn_flatten_weight", torch::CppFunction::makeFromBoxedFunction<&run_flatten>());
}

} // namespace shardwise::nn
