// Cells of recurrent networks, for which torch asks a private device for kernels that do all at once: here of
// operations as torch makes them elsewhere, by which autograd finds their backward.
#include "late.h"

#include <ATen/ATen.h>

namespace late {
namespace {

using OptionalTensor = std::optional<at::Tensor>;

std::vector<at::Tensor> with_bias(const at::Tensor& gates, const OptionalTensor& bias, int64_t count) {
  return (bias && bias->defined() ? gates + *bias : gates).chunk(count, 1);
}

/// Returns the new state and the new cell; a backward of its own would need more.
std::tuple<at::Tensor, at::Tensor, at::Tensor> lstm_cell(
    const at::Tensor& input, const at::Tensor& hidden, const at::Tensor& cell, const OptionalTensor& input_bias,
    const OptionalTensor& hidden_bias) {
  const auto gates = with_bias(with_bias(input, input_bias, 1)[0] + hidden, hidden_bias, 4);
  const auto next = gates[1].sigmoid() * cell + gates[0].sigmoid() * gates[2].tanh();
  return {gates[3].sigmoid() * next.tanh(), next, at::Tensor()};
}

/// Returns the new state.
std::tuple<at::Tensor, at::Tensor> gru_cell(
    const at::Tensor& input, const at::Tensor& hidden, const at::Tensor& state, const OptionalTensor& input_bias,
    const OptionalTensor& hidden_bias) {
  const auto from_input = with_bias(input, input_bias, 3);
  const auto from_state = with_bias(hidden, hidden_bias, 3);
  const auto reset = (from_input[0] + from_state[0]).sigmoid();
  const auto update = (from_input[1] + from_state[1]).sigmoid();
  const auto candidate = (from_input[2] + reset * from_state[2]).tanh();
  return {(state - candidate) * update + candidate, at::Tensor()};
}

} // namespace

void register_recurrent(torch::Library& library) {
  library.impl("_thnn_fused_lstm_cell", &lstm_cell);
  library.impl("_thnn_fused_gru_cell", &gru_cell);
}

} // namespace late
