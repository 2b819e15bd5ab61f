#pragma once

// A model that is used through a method other than forward.
#include "ranks/transformer_model.h"

namespace shardwise::test {

struct VisionImpl : torch::nn::Module {
  VisionImpl()
      : patches(register_module("patches", torch::nn::Conv2d(torch::nn::Conv2dOptions(3, kWidth, 2).stride(2)))),
        blocks(register_module("blocks", torch::nn::ModuleList())),
        norm(register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({kWidth})))),
        head(register_module("head", torch::nn::Linear(kWidth, 5))) {
    for (int i = 0; i < 2; ++i) blocks->push_back(TransformerBlock(kWidth, 2, Checkpointing::none));
    fill(*this);
  }
  torch::Tensor forward_features(const torch::Tensor& images) {
    auto x = patches->forward(images).flatten(2).transpose(1, 2);
    for (size_t i = 0; i < blocks->size(); ++i) x = blocks->at<TransformerBlockImpl>(i).forward(x);
    return norm->forward(x).mean(1);
  }
  torch::Tensor forward(const torch::Tensor& images) {
    return head->forward(forward_features(images));
  }
  torch::nn::Conv2d patches;
  torch::nn::ModuleList blocks;
  torch::nn::LayerNorm norm;
  torch::nn::Linear head;
};
TORCH_MODULE(Vision);

/// Two times in three the method alone, which leaves the head unused, as torch's row does.
inline Program<Vision> vision_program() {
  return {
      [] { return Vision(); },
      [](Vision& model, int number, int rank) {
        const auto images =
            torch::randn({2, 3, 4, 4}, generator(1000 * number + rank + 5)).to(model->norm->weight.dtype());
        return (number % 3 == 2 ? model->forward(images) : model->forward_features(images)).pow(2).sum();
      }};
}

} // namespace shardwise::test
