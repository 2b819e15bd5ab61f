#include "nn/touch/touch.h"
#include "split/split_parameter.h"
#include "tensor_parallel/layers.h"
#include "tensor_parallel/nodes.h"

#include <shardwise/error.h>

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/GradMode.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <string>
#include <string_view>
#include <unordered_map>
#include <unordered_set>

namespace shardwise::tensor_parallel {
namespace {

using Arguments = c10::ArrayRef<c10::IValue>;
using Views = std::unordered_map<size_t, split::SplitView>;

/// An operation with pieces among its arguments, which are at the positions that `views` has.
struct Call {
  const c10::OperatorHandle& operation;
  Arguments arguments;
  const Views& views;

  std::string name() const {
    return operation.operator_name().name;
  }
  const split::SplitView* view(size_t position) const {
    const auto found = views.find(position);
    return found == views.end() ? nullptr : &found->second;
  }
  at::Tensor tensor(size_t position) const {
    const auto& value = arguments[position];
    return value.isTensor() ? value.toTensor() : at::Tensor();
  }
};

[[noreturn]] void refuse(const Call& call, const std::string& why = "") {
  const auto start = about(call.name(), *call.views.begin()->second.parameter);
  throw Error(c10::str(
      start, why.empty() ? "was about to be read as if it were whole." : why,
      " Only linear, addmm, mm, matmul with the weight or its transpose, and embedding compute with pieces. Leave the "
      "parameter out of the plan of parallelize(), or compute with what these operations return."));
}

/// The matrix [inputs, outputs] at this position, as [outputs, inputs].
Weight transposed(const Call& call, size_t position) {
  const auto* view = call.view(position);
  auto tensor = call.tensor(position);
  if (tensor.dim() != 2) refuse(call, c10::str("has ", tensor.dim(), " dimensions, but a product needs a matrix."));
  Weight weight{tensor.t(), *view};
  weight.view.dim = 1 - view->dim;
  return weight;
}

at::Tensor run_linear(const Call& call) {
  if (call.view(1) == nullptr || call.view(0) != nullptr) refuse(call, "is not the weight here.");
  return linear(call.tensor(0), {call.tensor(1), *call.view(1)}, call.tensor(2), call.view(2), call.name());
}

at::Tensor run_product(const Call& call) {
  if (call.view(1) == nullptr || call.view(0) != nullptr) {
    refuse(call, "stands on the left: write the product as matmul(input, weight).");
  }
  return linear(call.tensor(0), transposed(call, 1), {}, nullptr, call.name());
}

at::Tensor run_addmm(const Call& call) {
  if (call.view(2) == nullptr || call.view(1) != nullptr) {
    refuse(call, "stands on the left: write it as addmm(bias, input, weight).");
  }
  if (call.arguments[3].toScalar().toDouble() != 1 || call.arguments[4].toScalar().toDouble() != 1) {
    refuse(call, "is used with a beta or alpha that is not 1.");
  }
  return linear(call.tensor(1), transposed(call, 2), call.tensor(0), call.view(0), call.name());
}

at::Tensor run_embedding(const Call& call) {
  if (call.view(0) == nullptr) refuse(call, "is not the table here.");
  return embedding(
      {call.tensor(0), *call.view(0)}, call.tensor(1),
      {call.arguments[2].toInt(), call.arguments[3].toBool(), call.arguments[4].toBool()});
}

/// A bias that is added to the outputs of colwise(), as torch's C++ Linear does by itself: what takes its place.
std::optional<at::Tensor> added_bias(const Call& call) {
  const auto name = call.name();
  const auto* view = call.views.size() == 1 ? call.view(1) : nullptr;
  if ((name != "aten::add" && name != "aten::add_") || view == nullptr) return std::nullopt;
  const auto bias = call.tensor(1);
  const auto outputs = call.tensor(0);
  if (bias.dim() != 1 || outputs.dim() == 0 || call.arguments[2].toScalar().toDouble() != 1) return std::nullopt;
  auto added = bias_of_outputs(bias, *view);
  return added.size(0) == outputs.size(-1) ? std::optional(added) : std::nullopt;
}

using Run = at::Tensor (*)(const Call&);

const std::unordered_map<std::string_view, Run>& layers() {
  static const std::unordered_map<std::string_view, Run> all{
      {"aten::linear", &run_linear},
      {"aten::mm", &run_product},
      {"aten::matmul", &run_product},
      {"aten::addmm", &run_addmm},
      {"aten::embedding", &run_embedding}};
  return all;
}

/// What the only result of an operation on one piece is a view or copy of; nothing if it is something else.
std::optional<split::SplitView> view_made(const Call& call) {
  if (call.views.size() != 1 || call.views.begin()->first != 0) return std::nullopt;
  auto view = call.views.begin()->second;
  const auto name = call.name();
  const auto tensor = call.tensor(0);
  if (name == "aten::detach" || name == "aten::alias") return view;
  const auto dims = tensor.dim();
  if (name == "aten::t" || name == "aten::numpy_T" || name == "aten::mT") {
    if (dims == 2) view.dim = 1 - view.dim;
    return dims <= 2 ? std::optional(view) : std::nullopt;
  }
  if (name == "aten::transpose") {
    if (!call.arguments[1].isInt()) return std::nullopt;
    const auto first = c10::maybe_wrap_dim(call.arguments[1].toInt(), dims);
    const auto second = c10::maybe_wrap_dim(call.arguments[2].toInt(), dims);
    view.dim = view.dim == first ? second : view.dim == second ? first : view.dim;
    return view;
  }
  return std::nullopt;
}

/// A slice of whole segments, whose bounds count places of the whole parameter: gives it those of the piece.
std::optional<split::SplitView> view_of_slice(const Call& call, torch::jit::Stack& stack) {
  if (call.views.size() != 1 || call.view(0) == nullptr || call.name() != "aten::slice") return std::nullopt;
  auto view = *call.view(0);
  const auto dims = call.tensor(0).dim();
  if (c10::maybe_wrap_dim(call.arguments[1].toInt(), dims) != view.dim || call.arguments[4].toInt() != 1) {
    return std::nullopt;
  }
  const auto size = view.pieces.size();
  const auto segment = size / view.pieces.segments();
  const auto bound = [&](size_t position, int64_t otherwise) {
    const auto& value = call.arguments[position];
    const auto given = value.isNone() ? otherwise : value.toInt();
    return std::clamp<int64_t>(given < 0 ? given + size : given, 0, size);
  };
  const auto start = bound(2, 0);
  const auto end = bound(3, size);
  if (segment == 0 || start % segment != 0 || end % segment != 0 || end <= start) return std::nullopt;
  const auto own = call.tensor(0).size(view.dim) / view.pieces.segments();
  const auto count = call.arguments.size();
  torch::jit::peek(stack, 2, count) = start / segment * own;
  torch::jit::peek(stack, 3, count) = end / segment * own;
  view.pieces = view.pieces.some((end - start) / segment);
  return view;
}

/// Reads that are no part of a computation, such as those of a copy that somebody keeps; and operations whose result
/// shard_copies.cpp marks.
bool is_harmless(std::string_view name) {
  static const std::unordered_set<std::string_view> names{
      "aten::clone", "aten::to", "aten::_to_copy", "aten::requires_grad_", "aten::set_data", "aten::retain_grad"};
  return names.contains(name);
}

/// Products and the like: what a forward without autograd may do with a parameter, and nothing else does.
bool is_layer_like(std::string_view name) {
  static const std::unordered_set<std::string_view> names{
      "aten::bmm",
      "aten::baddbmm",
      "aten::addbmm",
      "aten::einsum",
      "aten::mv",
      "aten::addmv",
      "aten::dot",
      "aten::vdot",
      "aten::inner",
      "aten::outer",
      "aten::tensordot",
      "aten::chain_matmul",
      "aten::linalg_multi_dot",
      "aten::bilinear",
      "aten::conv1d",
      "aten::conv2d",
      "aten::conv3d",
      "aten::conv_transpose1d",
      "aten::conv_transpose2d",
      "aten::conv_transpose3d",
      "aten::convolution",
      "aten::layer_norm",
      "aten::rms_norm",
      "aten::group_norm",
      "aten::batch_norm",
      "aten::instance_norm",
      "aten::prelu",
      "aten::embedding_bag",
      "aten::lstm",
      "aten::gru",
      "aten::rnn_tanh",
      "aten::rnn_relu",
      "aten::scaled_dot_product_attention"};
  return names.contains(name);
}

/// Whether pieces are read by what detach() made of them only, as who looks at values does.
bool is_detached(const Call& call) {
  return std::all_of(call.views.begin(), call.views.end(), [&](const auto& each) {
    const auto tensor = call.tensor(each.first);
    return tensor.defined() && !tensor.requires_grad() && !split::split_parameter_of(tensor);
  });
}

Views views_among(Arguments arguments) {
  Views views;
  nn::for_each_tensor_among(arguments, [&](size_t position, const at::Tensor& tensor) {
    if (auto view = split::find_split(tensor)) views.emplace(position, std::move(*view));
  });
  return views;
}

bool run_with_pieces(const c10::OperatorHandle& operation, c10::DispatchKeySet keys, torch::jit::Stack& stack) {
  if (NoExchangeGuard::is_active()) return false;
  const auto count = operation.schema().arguments().size();
  const auto views = views_among(torch::jit::last(stack, count));
  if (views.empty()) return false;
  const Call call{operation, torch::jit::last(stack, count), views};
  const auto name = call.name();
  const bool is_unknown = std::any_of(
      views.begin(), views.end(), [](const auto& each) { return each.second.dim == split::SplitView::kUnknown; });
  if (is_unknown) {
    if (layers().contains(name) || is_layer_like(name))
      refuse(call, "is read by a view of another kind than its transpose.");
    return false;
  }
  if (const auto layer = layers().find(name); layer != layers().end()) {
    auto result = layer->second(call);
    torch::jit::drop(stack, count);
    stack.emplace_back(std::move(result));
    return true;
  }
  auto view = view_made(call);
  if (!view) view = view_of_slice(call, stack);
  if (view) {
    nn::run_untouched(operation, keys, &stack);
    const auto& made = stack.back().toTensor();
    split::add_split_view(made, *view);
    nn::add_touch_key(made);
    return true;
  }
  if (const auto bias = added_bias(call)) {
    torch::jit::peek(stack, 1, count) = *bias;
    return false;
  }
  const bool is_allowed =
      is_harmless(name) || (!is_layer_like(name) && (!c10::GradMode::is_enabled() || is_detached(call)));
  if (!is_allowed) refuse(call);
  return false;
}

} // namespace

void watch_pieces() {
  static constexpr nn::Substitute kSubstitute{
      .concerns = [](const at::Tensor& tensor) { return split::find_split(tensor).has_value(); },
      .run = &run_with_pieces};
  nn::set_substitute(kSubstitute);
}

} // namespace shardwise::tensor_parallel
