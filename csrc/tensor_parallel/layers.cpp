#include "tensor_parallel/layers.h"

#include "split/exchange.h"
#include "tensor_parallel/nodes.h"

#include <shardwise/error.h>

#include <ATen/ops/_assert_async.h>
#include <ATen/ops/add.h>
#include <ATen/ops/embedding.h>
#include <ATen/ops/zeros.h>
#include <c10/util/StringUtil.h>

namespace shardwise::tensor_parallel {

std::string about(const std::string& operation, const split::SplitParameter& parameter) {
  auto piece = parameter.sizes;
  piece[static_cast<size_t>(parameter.dim)] = parameter.pieces.length(parameter.axis->rank());
  return c10::str(
      "shardwise: rank ", parameter.axis->mesh.rank(), ": ", operation, ": '", parameter.name,
      "', of which this rank has ", at::IntArrayRef(piece), " of ", at::IntArrayRef(parameter.sizes), " along axis '",
      parameter.axis->name, "', ");
}

namespace {

constexpr auto kOutputs = "the gather of the outputs";
constexpr auto kGradient = "the gather of the gradient";
constexpr auto kSum = "the sum of the outputs";

/// Every rank gets the outputs of all.
at::Tensor gather_outputs(const at::Tensor& output, const Exchange& exchange, const layout::AxisPieces& pieces) {
  const auto dim = output.dim() - 1;
  return with_backward(
      output, exchange.gather(output, dim, pieces, kOutputs), "shardwise::GatherOutputs",
      [exchange, dim, pieces](const at::Tensor& gradient) { return exchange.own(gradient, dim, pieces); });
}

/// The features of a whole input that this rank's piece of the weight belongs to.
at::Tensor own_inputs(const at::Tensor& input, const Exchange& exchange, const layout::AxisPieces& pieces) {
  const auto dim = input.dim() - 1;
  return with_backward(
      input, exchange.own(input, dim, pieces), "shardwise::SplitInput",
      [exchange, dim, pieces](const at::Tensor& gradient) {
        return exchange.gather(gradient, dim, pieces, "the gather of the input's gradient");
      });
}

/// The sum of what all ranks computed: whole on each, or its part along the sequence_dim.
at::Tensor sum_outputs(const at::Tensor& output, const Exchange& exchange, const std::optional<int64_t>& sequence_dim) {
  if (!sequence_dim) {
    return with_backward(output, exchange.sum(output, kSum), "shardwise::SumOutputs", [](const at::Tensor& gradient) {
      return gradient;
    });
  }
  const auto dim = *sequence_dim;
  return with_backward(
      output, exchange.scatter_sum(output, dim, kSum), "shardwise::ScatterOutputs",
      [exchange, dim](const at::Tensor& gradient) { return exchange.gather(gradient, dim, kGradient); });
}

} // namespace

at::Tensor bias_of_outputs(const at::Tensor& bias, const split::SplitView& view) {
  const auto& parameter = *view.parameter;
  const bool is_gathered = parameter.matrix && parameter.matrix->gather_output() && parameter.axis->ranks.size() > 1;
  return is_gathered ? gather_outputs(bias, Exchange(view.parameter), view.pieces) : bias;
}

namespace {

at::Tensor colwise(
    const at::Tensor& input, const Weight& weight, const at::Tensor& bias, const Exchange& exchange, const Split& how) {
  const bool is_alone = weight.view.parameter->axis->ranks.size() == 1;
  const auto gradient = is_alone             ? InputGradient::own
                        : how.sequence_dim() ? InputGradient::scatter
                                             : InputGradient::sum;
  auto output = split_linear(
      as_autocast(input), as_autocast(weight.tensor), as_autocast(bias), exchange, gradient,
      how.sequence_dim().value_or(0));
  return how.gather_output() && !is_alone ? gather_outputs(output, exchange, weight.view.pieces) : output;
}

at::Tensor rowwise(
    const at::Tensor& input, const Weight& weight, const at::Tensor& bias, const Exchange& exchange, const Split& how) {
  const bool is_alone = weight.view.parameter->axis->ranks.size() == 1;
  const auto own = how.split_input() && !is_alone ? own_inputs(input, exchange, weight.view.pieces) : input;
  auto output = split_linear(as_autocast(own), as_autocast(weight.tensor), {}, exchange, InputGradient::own);
  if (!is_alone) output = sum_outputs(output, exchange, how.sequence_dim());
  return bias.defined() ? at::add(output, as_autocast(bias)) : output;
}

} // namespace

at::Tensor linear(
    const at::Tensor& input, const Weight& weight, const at::Tensor& bias, const split::SplitView* bias_view,
    const std::string& operation) {
  const auto& parameter = *weight.view.parameter;
  const auto refuse = [&](const std::string& why) { throw ValueError(about(operation, parameter) + why); };
  if (!parameter.matrix) refuse("serves an embedding only. Give it colwise(), rowwise() or vocabulary() in the plan.");
  const auto& how = *parameter.matrix;
  const bool is_columns = weight.view.dim == 0;
  const auto& pieces = weight.view.pieces;
  if (is_columns && bias.defined() && (bias_view == nullptr || !(bias_view->pieces == pieces))) {
    refuse("has a bias that is not divided in the same way. Give it colwise() in the plan too.");
  }
  if (!is_columns && bias_view != nullptr) {
    refuse("has a bias that is divided too, but it is added after the sum over the ranks: leave it out of the plan.");
  }
  const auto features = input.dim() > 0 ? input.size(-1) : 0;
  const auto wanted = !is_columns && how.split_input() ? pieces.size() : weight.tensor.size(1);
  if (features != wanted) {
    refuse(c10::str(
        "got an input of ", features, " features instead of ", wanted, ". ",
        is_columns ? "colwise() takes the whole input."
        : features == pieces.size()
            ? "rowwise() takes what colwise() left; for a whole input give it split_input(true)."
            : "rowwise() takes this rank's piece of the input, divided as the weight is."));
  }
  const Exchange exchange(weight.view.parameter);
  return is_columns ? colwise(input, weight, bias, exchange, how) : rowwise(input, weight, bias, exchange, how);
}

namespace {

template <typename What>
void require_in_table(const at::Tensor& indices, int64_t entries, const What& what) {
  if (indices.numel() == 0) return;
  const auto is_inside = indices.ge(0).logical_and(indices.lt(entries)).all();
  const auto text = [&] {
    return what() + "got an index that is not in the whole table. Give indices from 0 to its number of entries.";
  };
  if (!indices.device().is_cpu()) return at::_assert_async(is_inside, text());
  if (!is_inside.item<bool>()) throw ValueError(text());
}

} // namespace

at::Tensor embedding(const Weight& weight, const at::Tensor& indices, const EmbeddingSettings& settings) {
  const auto& parameter = *weight.view.parameter;
  const auto text = [&] { return about("aten::embedding", parameter); };
  const auto look_up = [&](const at::Tensor& at, int64_t padding) {
    return at::embedding(weight.tensor, at, padding, settings.scale_grad_by_freq, settings.sparse);
  };
  const Exchange exchange(weight.view.parameter);
  const auto& axis = *parameter.axis;
  if (axis.ranks.size() == 1) return look_up(indices, settings.padding_idx);
  if (!parameter.table) throw ValueError(text() + "serves a linear layer only. Give it vocabulary() in the plan.");
  const auto& pieces = weight.view.pieces;
  if (weight.view.dim == 1) {
    const auto output = look_up(indices, settings.padding_idx);
    return parameter.table->gather_output() ? gather_outputs(output, exchange, pieces) : output;
  }
  if (settings.scale_grad_by_freq) {
    throw ValueError(text() + "cannot scale gradients by frequency: use scale_grad_by_freq(false), or colwise().");
  }
  require_in_table(indices, pieces.size(), text);
  const auto range = pieces.ranges(axis.rank()).front();
  const auto is_elsewhere = indices.lt(range.start).logical_or(indices.ge(range.start + range.length));
  at::Tensor output;
  if (range.length == 0) {
    auto sizes = indices.sizes().vec();
    sizes.push_back(weight.tensor.size(1));
    output = weight.tensor.sum(0).add(at::zeros(sizes, weight.tensor.options()));
  } else {
    const auto padding = settings.padding_idx - range.start;
    const bool has_padding = settings.padding_idx >= 0 && padding >= 0 && padding < range.length;
    output = look_up(indices.sub(range.start).masked_fill(is_elsewhere, 0), has_padding ? padding : -1);
    output = output.masked_fill(is_elsewhere.unsqueeze(-1), 0);
  }
  return sum_outputs(output, exchange, parameter.table->sequence_dim());
}

} // namespace shardwise::tensor_parallel
