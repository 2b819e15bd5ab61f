#pragma once

#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/torch.h>

#include <memory>
#include <vector>

namespace shardwise::test {

/// A post-accumulate hook such as an optimizer-in-backward registers: it keeps a copy of every gradient that it sees.
class GradientRecord : public torch::autograd::PostAccumulateGradHook {
 public:
  explicit GradientRecord(std::vector<torch::Tensor>& seen) : seen_(seen) {}
  void operator()(const torch::Tensor& parameter) override {
    seen_.push_back(parameter.grad().clone());
  }

 private:
  std::vector<torch::Tensor>& seen_;
};

inline void record_gradients(const torch::Tensor& parameter, std::vector<torch::Tensor>& seen) {
  torch::autograd::impl::set_post_acc_grad_hooks(parameter, std::make_unique<GradientRecord>(seen));
}

} // namespace shardwise::test
