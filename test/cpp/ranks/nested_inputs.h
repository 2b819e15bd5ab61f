#pragma once

// A module without parameters, and what its unit does to a call: nothing.
#include "ranks/models.h"

namespace shardwise::test {

struct NestedInputsImpl : torch::nn::Module {
  using Pair = std::tuple<torch::Tensor, std::vector<torch::Tensor>>;

  torch::Tensor forward(const torch::Tensor& x, const Pair& more, int64_t factor) {
    seen = {x, std::get<0>(more), std::get<1>(more).at(0), std::get<1>(more).at(1)};
    auto sum = torch::zeros_like(x);
    for (const auto& input : seen) sum = sum + input;
    return sum * factor;
  }
  std::vector<torch::Tensor> seen;
};
TORCH_MODULE(NestedInputs);

/// The module of this unit gets its inputs as they are, its hooks run, gradients come through, and nothing travels.
inline void assert_inputs_come_through(NestedInputs& model, const Unit& unit, const Rank& rank) {
  const auto counters = unit.counters();
  int before = 0;
  int after = 0;
  register_forward_pre_hook(*model, [&](torch::nn::Module&, HookTensors& inputs) {
    ++before;
    ASSERT_EQ(inputs.size(), 4U);
  });
  register_forward_hook(*model, [&](torch::nn::Module&, HookTensors& outputs) {
    ++after;
    ASSERT_EQ(outputs.size(), 1U);
  });
  model->to(torch::kCPU);
  for (int step = 0; step < 3; ++step) {
    std::vector<torch::Tensor> inputs;
    for (int i = 0; i < 4; ++i) inputs.push_back(batch(10 * step + i, rank.rank(), 3).requires_grad_());
    const NestedInputsImpl::Pair more{inputs[1], {inputs[2], inputs[3]}};
    const auto result = call(model, inputs[0], more, 2);
    for (int i = 0; i < 4; ++i) ASSERT_TRUE(model->seen[i].is_same(inputs[i]));
    ASSERT_TRUE(torch::equal(result, (inputs[0] + inputs[1] + inputs[2] + inputs[3]) * 2));
    result.sum().backward();
    for (const auto& input : inputs) ASSERT_TRUE(torch::equal(input.grad(), torch::full_like(input, 2)));
    ASSERT_EQ(before, step + 1);
    ASSERT_EQ(after, step + 1);
  }
  const auto plan = unit.plan();
  ASSERT_EQ(plan.units.size(), 1U);
  ASSERT_TRUE(plan.units[0].groups.empty());
  ASSERT_EQ(unit.counters().collective_bytes, counters.collective_bytes);
}

} // namespace shardwise::test
