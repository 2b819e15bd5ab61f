#pragma once

// Models that the rows of replicate_training and fully_shard_training share.
#include "ranks/training_parity.h"

namespace shardwise::test {

struct MlpImpl : torch::nn::Module {
  explicit MlpImpl(int64_t width)
      : in_proj(register_module("in_proj", torch::nn::Linear(width, 4 * width))),
        out_proj(register_module("out_proj", torch::nn::Linear(4 * width, width))) {}
  torch::Tensor forward(const torch::Tensor& x) {
    return torch::tanh(out_proj->forward(torch::relu(in_proj->forward(x))));
  }
  torch::nn::Linear in_proj, out_proj;
};
TORCH_MODULE(Mlp);

/// Several of them, perhaps with a linear layer before. Activations stay of the same size whatever the width.
inline torch::nn::Sequential mlps(int64_t width, int count, bool linear_first = false) {
  torch::nn::Sequential model;
  if (linear_first) model->push_back(torch::nn::Linear(width, width));
  for (int i = 0; i < count; ++i) model->push_back(Mlp(width));
  fill(*model);
  const torch::NoGradGuard guard;
  for (auto& parameter : model->parameters()) parameter.mul_(1 / std::sqrt(width));
  return model;
}

/// The widths of models that are one group; not all can be cut evenly.
inline const std::vector<std::vector<int64_t>> kWidths{{7, 15, 3}, {16, 17, 8}, {32, 16, 8}};

/// Linear layers with tanh between them.
inline Program<torch::nn::Sequential> mlp_program(const std::vector<int64_t>& widths) {
  return {
      [widths] { return mlp(widths); },
      [widths](torch::nn::Sequential& model, int number, int rank) {
        return model->forward(batch_for(model, number, rank, widths[0])).pow(2).mean();
      }};
}

/// Three MLPs. Every second time the first is run alone, with the optimizer's step of all in between.
inline Program<torch::nn::Sequential> non_root_program() {
  return {
      [] { return mlps(32, 3); },
      [](torch::nn::Sequential& model, int number, int rank) {
        const auto x = batch_for(model, number, rank, 32);
        return number % 2 == 0 ? model->forward(x).sum() : model->at<MlpImpl>(0).forward(x).sum();
      }};
}

/// One of its modules is called twice in a forward.
struct TwiceImpl : torch::nn::Module {
  TwiceImpl() {
    fill(*this);
  }
  torch::Tensor forward(const torch::Tensor& x) {
    return outer->forward(torch::tanh(inner->forward(x)) + torch::sigmoid(inner->forward(x * 0.5)));
  }
  torch::nn::Linear inner = register_module("inner", torch::nn::Linear(5, 5));
  torch::nn::Linear outer = register_module("outer", torch::nn::Linear(5, 3));
};
TORCH_MODULE(Twice);

inline Program<Twice> twice_program() {
  return {
      [] { return Twice(); }, [](Twice& model, int number,
                                 int rank) { return model->forward(batch_for(model, number, rank, 5)).pow(2).sum(); }};
}

/// Of an optimizer on the device of the model; on a CPU there is nothing to wait for.
template <typename Model>
void set_optimizer_event(Model& model, int part) {
  if (part > 0) return;
  const auto device = model->parameters().front().device();
  const auto event = std::make_shared<c10::Event>(device.type());
  if (!device.is_cpu()) event->record(c10::impl::VirtualGuardImpl(device.type()).getStream(device));
  unit(*model).set_post_optim_event(event);
}

} // namespace shardwise::test
