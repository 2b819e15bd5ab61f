// Cells of recurrent networks, for which torch asks a private device for kernels that do all at once: here of
// operations as torch makes them elsewhere.
#include "late.h"

#include <ATen/ATen.h>

namespace late {
namespace {

using OptionalTensor = std::optional<at::Tensor>;

at::Tensor with_bias(const at::Tensor& gates, const OptionalTensor& bias) {
  return bias && bias->defined() ? gates + *bias : gates;
}

/// Returns the new state, the new cell, and the gates for the backward.
std::tuple<at::Tensor, at::Tensor, at::Tensor> lstm_cell(
    const at::Tensor& input, const at::Tensor& hidden, const at::Tensor& cell, const OptionalTensor& input_bias,
    const OptionalTensor& hidden_bias) {
  const auto gates = (with_bias(input, input_bias) + with_bias(hidden, hidden_bias)).chunk(4, 1);
  const auto in = gates[0].sigmoid();
  const auto forget = gates[1].sigmoid();
  const auto candidate = gates[2].tanh();
  const auto out = gates[3].sigmoid();
  const auto next = forget * cell + in * candidate;
  return {out * next.tanh(), next, at::cat({in, forget, candidate, out}, 1)};
}

/// Returns the gradients of the gates, of the cell and of the biases.
std::tuple<at::Tensor, at::Tensor, at::Tensor> lstm_cell_backward(
    const OptionalTensor& state_gradient, const OptionalTensor& cell_gradient, const at::Tensor& cell,
    const at::Tensor& next, const at::Tensor& workspace, bool has_bias) {
  const auto kept = workspace.chunk(4, 1);
  const auto &in = kept[0], &forget = kept[1], &candidate = kept[2], &out = kept[3];
  const auto of_state = state_gradient && state_gradient->defined() ? *state_gradient : at::zeros_like(next);
  const auto squashed = next.tanh();
  auto of_next = of_state * out * (1 - squashed * squashed);
  if (cell_gradient && cell_gradient->defined()) of_next = of_next + *cell_gradient;
  const auto of_gates = at::cat(
      {of_next * candidate * in * (1 - in), of_next * cell * forget * (1 - forget),
       of_next * in * (1 - candidate * candidate), of_state * squashed * out * (1 - out)},
      1);
  return {of_gates, of_next * forget, has_bias ? of_gates.sum(0) : at::Tensor()};
}

/// Returns the new state, and what the backward needs.
std::tuple<at::Tensor, at::Tensor> gru_cell(
    const at::Tensor& input, const at::Tensor& hidden, const at::Tensor& state, const OptionalTensor& input_bias,
    const OptionalTensor& hidden_bias) {
  const auto from_input = with_bias(input, input_bias).chunk(3, 1);
  const auto from_state = with_bias(hidden, hidden_bias).chunk(3, 1);
  const auto reset = (from_input[0] + from_state[0]).sigmoid();
  const auto update = (from_input[1] + from_state[1]).sigmoid();
  const auto candidate = (from_input[2] + reset * from_state[2]).tanh();
  return {(state - candidate) * update + candidate, at::cat({reset, update, candidate, state, from_state[2]}, 1)};
}

/// Returns the gradients of both gates, of the state and of both biases.
std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor> gru_cell_backward(
    const at::Tensor& gradient, const at::Tensor& workspace, bool has_bias) {
  const auto kept = workspace.chunk(5, 1);
  const auto &reset = kept[0], &update = kept[1], &candidate = kept[2], &state = kept[3], &from_state = kept[4];
  const auto of_candidate = gradient * (1 - update) * (1 - candidate * candidate);
  const auto of_update = gradient * (state - candidate) * update * (1 - update);
  const auto of_reset = of_candidate * from_state * reset * (1 - reset);
  const auto of_input = at::cat({of_reset, of_update, of_candidate}, 1);
  const auto of_hidden = at::cat({of_reset, of_update, of_candidate * reset}, 1);
  return {
      of_input, of_hidden, gradient * update, has_bias ? of_input.sum(0) : at::Tensor(),
      has_bias ? of_hidden.sum(0) : at::Tensor()};
}

} // namespace

void register_recurrent(torch::Library& library) {
  library.impl("_thnn_fused_lstm_cell", &lstm_cell);
  library.impl("_thnn_fused_lstm_cell_backward_impl", &lstm_cell_backward);
  library.impl("_thnn_fused_gru_cell", &gru_cell);
  library.impl("_thnn_fused_gru_cell_backward", &gru_cell_backward);
}

} // namespace late
