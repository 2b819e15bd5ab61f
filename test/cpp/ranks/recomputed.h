#pragma once

// Functions whose backward runs backwards of its own, as torch's reentrant checkpoint does.
#include <torch/torch.h>

#include <functional>

namespace shardwise::test {

/// What is run again in a backward, kept in its context.
struct Rerun : torch::CustomClassHolder {
  using Run = std::function<torch::Tensor(const torch::Tensor&)>;
  struct Again {
    torch::Tensor result;
    torch::Tensor gradient;
  };

  static void keep(torch::autograd::AutogradContext* context, std::vector<Run> runs) {
    auto kept = c10::make_intrusive<Rerun>();
    kept->runs = std::move(runs);
    context->saved_data["runs"] = c10::IValue::make_capsule(std::move(kept));
  }
  /// With a backward of its own.
  static Again again(
      torch::autograd::AutogradContext* context, size_t which, const torch::Tensor& x, const torch::Tensor& gradient) {
    const torch::AutoGradMode with_gradients(true);
    const auto kept = c10::static_intrusive_pointer_cast<Rerun>(context->saved_data["runs"].toCapsule());
    const auto input = x.detach().requires_grad_();
    const auto result = kept->runs.at(which)(input);
    result.backward(gradient);
    return {result.detach(), input.grad()};
  }

  std::vector<Run> runs;
};

/// Runs a function on so many pieces and keeps nothing. Its backward runs it again, with a backward of its own for
/// each.
class Recomputed : public torch::autograd::Function<Recomputed> {
 public:
  using Run = Rerun::Run;

  static torch::Tensor forward(
      torch::autograd::AutogradContext* context, const torch::Tensor& x, const Run& run, int64_t pieces) {
    Rerun::keep(context, {run});
    context->saved_data["pieces"] = pieces;
    context->save_for_backward({x});
    std::vector<torch::Tensor> found;
    for (const auto& piece : x.chunk(pieces)) found.push_back(run(piece));
    return torch::cat(found);
  }
  static torch::autograd::variable_list backward(
      torch::autograd::AutogradContext* context, const torch::autograd::variable_list& gradients) {
    const auto pieces = context->saved_data["pieces"].toInt();
    const auto given = gradients[0].chunk(pieces);
    std::vector<torch::Tensor> found;
    for (const auto& piece : context->get_saved_variables()[0].chunk(pieces)) {
      found.push_back(Rerun::again(context, 0, piece, given[found.size()]).gradient);
    }
    return {torch::cat(found), torch::Tensor(), torch::Tensor()};
  }
};

/// A reversible layer: the first half of x gets f of the second added, then the second gets g of the first. Keeps its
/// output alone. Its backward finds the inputs of each function, and runs it again with a backward of its own.
class Reversible : public torch::autograd::Function<Reversible> {
 public:
  using Run = Rerun::Run;

  static torch::Tensor forward(
      torch::autograd::AutogradContext* context, const torch::Tensor& x, const Run& f, const Run& g) {
    Rerun::keep(context, {f, g});
    const auto halves = x.chunk(2);
    const auto first = halves[0] + f(halves[1]);
    const auto y = torch::cat({first, halves[1] + g(first)});
    context->save_for_backward({y});
    return y;
  }
  static torch::autograd::variable_list backward(
      torch::autograd::AutogradContext* context, const torch::autograd::variable_list& gradients) {
    const auto halves = context->get_saved_variables()[0].chunk(2);
    const auto given = gradients[0].chunk(2);
    const auto of_g = Rerun::again(context, 1, halves[0], given[1]);
    const auto of_first = given[0] + of_g.gradient;
    const auto of_f = Rerun::again(context, 0, halves[1] - of_g.result, of_first);
    return {torch::cat({of_first, given[1] + of_f.gradient}), torch::Tensor(), torch::Tensor()};
  }
};

} // namespace shardwise::test
