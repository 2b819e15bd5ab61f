// The row that only a GPU can show: a step is captured once and replayed.
#include "ranks/training_models.h"
#include "support/variables.h"

#include <ATen/cuda/CUDAGraph.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

namespace shardwise::test {
namespace {

constexpr int kReplays = 4;

torch::nn::Sequential two_layers() {
  torch::nn::Sequential model(torch::nn::Linear(16, 32), torch::nn::ReLU(), torch::nn::Linear(32, 8));
  fill(*model, 3);
  model->to(at::kCUDA);
  return model;
}

at::Tensor input_of(int step) {
  return torch::randn({5, 16}, generator(100 + step)).to(at::kCUDA);
}

at::Tensor pass(torch::nn::Sequential& model, const at::Tensor& input) {
  auto output = model->forward(input);
  output.sum().backward();
  return output.detach();
}

/// The output and the gradients.
std::vector<at::Tensor> shown(const torch::nn::Sequential& model, const at::Tensor& output) {
  std::vector<at::Tensor> tensors{output};
  for (const auto& parameter : model->parameters()) tensors.push_back(parameter.grad());
  return tensors;
}

} // namespace

TEST(FullyShardCudaGraph, TwoLayerFullyShardCudagraph) {
  if (!torch::cuda::is_available()) GTEST_SKIP() << "a CUDA graph needs a GPU";
  const Variables alone(Environment{{"RANK", std::nullopt}, {"WORLD_SIZE", std::nullopt}});
  const auto mesh = Mesh::from_env(MeshOptions().device(at::kCUDA));
  const auto options = FullyShardOptions().mesh(mesh);
  auto model = two_layers();
  fully_shard(*model[0], options);
  fully_shard(*model[2], options);
  fully_shard(*model, options);

  const c10::cuda::CUDAStreamGuard on(c10::cuda::getStreamFromPool());
  const auto input = input_of(0);
  for (int i = 0; i < 3; ++i) {
    model->zero_grad();
    pass(model, input);
  }
  model->zero_grad();
  at::cuda::CUDAGraph graph;
  graph.capture_begin();
  const auto output = pass(model, input);
  graph.capture_end();
  const auto captured = shown(model, output);

  auto reference = two_layers();
  for (int step = 0; step < kReplays; ++step) {
    input.copy_(input_of(step));
    graph.replay();
    reference->zero_grad();
    const auto expected = shown(reference, pass(reference, input_of(step)));
    ASSERT_EQ(captured.size(), expected.size());
    for (size_t i = 0; i < expected.size(); ++i) {
      ASSERT_TRUE(at::equal(captured[i].view_as(expected[i]), expected[i])) << "step " << step << ", tensor " << i;
    }
  }
}

} // namespace shardwise::test
