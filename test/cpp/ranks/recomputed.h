#pragma once

// A function whose backward runs backwards of its own, as torch's reentrant checkpoint does.
#include <torch/torch.h>

#include <functional>

namespace shardwise::test {

/// Runs a function on so many pieces and keeps nothing. Its backward runs it again, with a backward of its own for
/// each.
class Recomputed : public torch::autograd::Function<Recomputed> {
 public:
  using Run = std::function<torch::Tensor(const torch::Tensor&)>;

  static torch::Tensor forward(
      torch::autograd::AutogradContext* context, const torch::Tensor& x, const Run& run, int64_t pieces) {
    auto holder = c10::make_intrusive<Holder>();
    holder->run = run;
    context->saved_data["run"] = c10::IValue::make_capsule(holder);
    context->saved_data["pieces"] = pieces;
    context->save_for_backward({x});
    std::vector<torch::Tensor> found;
    for (const auto& piece : x.chunk(pieces)) found.push_back(run(piece));
    return torch::cat(found);
  }
  static torch::autograd::variable_list backward(
      torch::autograd::AutogradContext* context, const torch::autograd::variable_list& gradients) {
    const auto holder = c10::static_intrusive_pointer_cast<Holder>(context->saved_data["run"].toCapsule());
    const auto pieces = context->saved_data["pieces"].toInt();
    const auto given = gradients[0].chunk(pieces);
    std::vector<torch::Tensor> found;
    for (const auto& piece : context->get_saved_variables()[0].chunk(pieces)) {
      const torch::AutoGradMode with_gradients(true);
      const auto again = piece.detach().requires_grad_();
      holder->run(again).backward(given[found.size()]);
      found.push_back(again.grad());
    }
    return {torch::cat(found), torch::Tensor(), torch::Tensor()};
  }

 private:
  struct Holder : torch::CustomClassHolder {
    Run run;
  };
};

} // namespace shardwise::test
