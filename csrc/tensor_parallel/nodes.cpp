#include "tensor_parallel/nodes.h"

#include "base/caller.h"
#include "base/compute_guard.h"
#include "base/torch_versions.h"

#include <shardwise/error.h>

#include <ATen/autocast_mode.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/matmul.h>
#include <c10/core/GradMode.h>
#include <c10/util/StringUtil.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/saved_variable.h>

#include <optional>

namespace shardwise::tensor_parallel {
namespace {

using torch::autograd::Node;
using torch::autograd::SavedVariable;
using torch::autograd::variable_list;

template <typename Name>
void refuse_second_order(const Name& name) {
  if (!c10::GradMode::is_enabled()) return;
  throw Error(c10::str(
      "shardwise: ", name(),
      " does not support gradients of gradients (backward with create_graph): the ranks' sums would be missing in "
      "them."));
}

class LinearNode : public Node {
 public:
  LinearNode(Exchange exchange, InputGradient gradient, int64_t sequence_dim)
      : exchange_(std::move(exchange)),
        gradient_(gradient),
        sequence_dim_(sequence_dim) {}

  void save(const at::Tensor& input, const at::Tensor& weight, const at::Tensor& bias) {
    input_ = SavedVariable(input, false);
    weight_ = SavedVariable(weight, false);
    has_bias_ = bias.defined();
  }
  std::string name() const override {
    return "shardwise::SplitLinear";
  }
  variable_list apply(variable_list&& gradients) override {
    return base::called_by_torch([&] { return gradients_of(gradients.front()); });
  }
  void release_variables() override {
    input_.reset_data();
    weight_.reset_data();
  }

 private:
  variable_list gradients_of(const at::Tensor& gradient);

  Exchange exchange_;
  InputGradient gradient_;
  int64_t sequence_dim_;
  SavedVariable input_;
  SavedVariable weight_;
  bool has_bias_ = false;
};

constexpr auto kInputGradient = "the sum of the input's gradient";

// Touches must be seen here: a unit gathers the weight for its use.
variable_list LinearNode::gradients_of(const at::Tensor& gradient) {
  refuse_second_order([&] { return exchange_.name("the layer"); });
  variable_list results(has_bias_ ? 3 : 2);
  if (!gradient.defined()) return results;
  const NoExchangeGuard plain;
  const auto rows = [](const at::Tensor& tensor) {
    return tensor.dim() == 1 ? tensor.unsqueeze(0) : tensor.flatten(0, -2);
  };
  std::optional<comm::Pending> pending;
  std::optional<Exchange::Scattering> scattering;
  if (task_should_compute_output(0)) {
    auto of_input = gradient.matmul(weight_.unpack());
    if (gradient_ == InputGradient::scatter) {
      scattering.emplace(exchange_.start_scatter_sum(of_input, sequence_dim_, kInputGradient));
    } else {
      of_input = of_input.contiguous();
      const bool is_sum = gradient_ == InputGradient::sum && exchange_.parameter().axis->ranks.size() > 1;
      if (is_sum && of_input.numel() > 0) pending.emplace(exchange_.start_sum(of_input, kInputGradient));
    }
    results[0] = std::move(of_input);
  }
  if (task_should_compute_output(1)) results[1] = rows(gradient).t().mm(rows(input_.unpack()));
  if (has_bias_ && task_should_compute_output(2)) results[2] = rows(gradient).sum(0);
  if (pending) pending->wait();
  if (scattering) results[0] = scattering->wait();
  return results;
}

class ExchangeNode : public Node {
 public:
  ExchangeNode(const char* name, std::function<at::Tensor(const at::Tensor&)> backward)
      : name_(name),
        backward_(std::move(backward)) {}

  std::string name() const override {
    return name_;
  }
  variable_list apply(variable_list&& gradients) override {
    return base::called_by_torch([&]() -> variable_list {
      refuse_second_order([&] { return name_; });
      if (!gradients.front().defined()) return {at::Tensor()};
      return {backward_(gradients.front())};
    });
  }

 private:
  std::string name_;
  std::function<at::Tensor(const at::Tensor&)> backward_;
};

} // namespace

at::Tensor split_linear(
    const at::Tensor& input, const at::Tensor& weight, const at::Tensor& bias, const Exchange& exchange,
    InputGradient gradient, int64_t sequence_dim) {
  auto whole = input;
  if (gradient == InputGradient::scatter) whole = exchange.gather(input, sequence_dim, "the gather of the input");
  auto output =
      base::guarded([&] { return at::linear(whole, weight, bias.defined() ? std::optional(bias) : std::nullopt); });
  if (!c10::GradMode::is_enabled() || !torch::autograd::compute_requires_grad(input, weight, bias)) return output;
  const auto node = base::make_node<LinearNode>(exchange, gradient, sequence_dim);
  node->save(whole, weight, bias);
  node->set_next_edges(
      bias.defined() ? torch::autograd::collect_next_edges(input, weight, bias)
                     : torch::autograd::collect_next_edges(input, weight));
  torch::autograd::create_gradient_edge(output, node);
  return output;
}

at::Tensor with_backward(
    const at::Tensor& input, at::Tensor output, const char* name,
    std::function<at::Tensor(const at::Tensor& gradient)> backward) {
  if (!c10::GradMode::is_enabled() || !input.requires_grad()) return output;
  const auto node = base::make_node<ExchangeNode>(name, std::move(backward));
  node->set_next_edges(torch::autograd::collect_next_edges(input));
  torch::autograd::create_gradient_edge(output, node);
  return output;
}

at::Tensor as_autocast(const at::Tensor& tensor) {
  if (!tensor.defined()) return tensor;
  const auto device = tensor.device().type();
  if (!at::autocast::is_autocast_available(device) || !at::autocast::is_autocast_enabled(device)) return tensor;
  return at::autocast::cached_cast(at::autocast::get_autocast_dtype(device), tensor, device);
}

} // namespace shardwise::tensor_parallel
