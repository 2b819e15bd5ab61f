#include "programs/model.h"

#include <algorithm>

namespace shardwise::test {
namespace {

NodeSpec random_node(Random& random, int depth, int& next_id) {
  NodeSpec spec;
  spec.id = next_id++;
  using Kind = NodeSpec::Kind;
  spec.kind = random.of<Kind>({Kind::nothing, Kind::linear, Kind::linear, Kind::norm, Kind::block});
  spec.bias = random.chance(70);
  spec.has_maybe = random.chance(40);
  spec.in_list = random.chance(50);
  const int count = depth == 0 ? random.between(2, 3) : depth < 3 && random.chance(50) ? random.between(1, 3) : 0;
  for (int i = 0; i < count; ++i) {
    spec.children.push_back(random_node(random, depth + 1, next_id));
    spec.calls.push_back(i);
  }
  if (count > 0 && random.chance(40)) spec.calls.push_back(random.below(count));
  return spec;
}

std::string node_text(const NodeSpec& spec, const std::string& indent) {
  const std::vector<std::string> kinds{"nothing", "linear", "norm", "block"};
  std::string text = indent + "node " + std::to_string(spec.id) + ": " + kinds[static_cast<size_t>(spec.kind)];
  if (spec.has_maybe) text += ", a layer that ranks may leave out";
  if (!spec.children.empty()) {
    text += spec.in_list ? ", calls children of a list:" : ", calls children:";
    for (const int call : spec.calls) text += " " + std::to_string(spec.children[static_cast<size_t>(call)].id);
  }
  text += "\n";
  for (const auto& child : spec.children) text += node_text(child, indent + "  ");
  return text;
}

} // namespace

bool NodeSpec::has_maybes() const {
  return has_maybe ||
         std::any_of(children.begin(), children.end(), [](const auto& child) { return child.has_maybes(); });
}

ModelSpec ModelSpec::random(Random& random) {
  ModelSpec spec;
  spec.width = random.between(2, 7);
  // Some models have large weights, whose gradients do not wait for those of others (CopyBatch::kSmall).
  if (spec.width == 7) spec.width = 183;
  int next_id = 0;
  spec.root = random_node(random, 0, next_id);
  return spec;
}

std::string ModelSpec::text() const {
  return "width " + std::to_string(width) + "\n" + node_text(root, "");
}

NodeImpl::NodeImpl(const NodeSpec& spec, int64_t width) : spec(spec) {
  using Kind = NodeSpec::Kind;
  const auto dense = [&](int64_t in, int64_t out) {
    return torch::nn::Linear(torch::nn::LinearOptions(in, out).bias(spec.bias));
  };
  scale = register_parameter("scale", torch::ones({width}));
  if (spec.kind == Kind::linear) linear = register_module("linear", dense(width, width));
  if (spec.kind == Kind::block) {
    linear = register_module("linear", dense(width, width + 3));
    down = register_module("down", dense(width + 3, width));
  }
  if (spec.kind != Kind::nothing && spec.kind != Kind::linear) {
    norm = register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({width})));
  }
  if (spec.has_maybe) maybe = register_module("maybe", dense(width, width));
  if (spec.in_list && !spec.children.empty()) list = register_module("list", torch::nn::ModuleList());
  for (const auto& child : spec.children) {
    children.push_back(std::make_shared<NodeImpl>(child, width));
    if (list) {
      list->push_back(children.back());
    } else {
      register_module("child" + std::to_string(child.id), children.back());
    }
  }
}

torch::Tensor NodeImpl::own(const torch::Tensor& x) {
  if (down) return x + torch::tanh(down->forward(torch::gelu(linear->forward(norm->forward(x)))));
  if (linear) return x + torch::tanh(linear->forward(x));
  return norm ? norm->forward(x) : x;
}

torch::Tensor NodeImpl::forward(const torch::Tensor& input, Walk& walk) {
  walk.ran.insert(spec.id);
  auto x = input * scale;
  if (walk.throws_forward == spec.id) throw Thrown();
  for (int i = 0; i < walk.repeats(spec.id); ++i) x = own(x);
  if (maybe && walk.uses_maybe(spec.id)) x = x + torch::sin(maybe->forward(x));
  for (const int call : spec.calls) {
    auto& child = *children[static_cast<size_t>(call)];
    if (!walk.skips(child.spec.id)) x = child.forward(x, walk);
  }
  if (walk.throws_backward == spec.id) {
    x.register_hook([](const torch::Tensor&) -> torch::Tensor { throw Thrown(); });
  }
  return x;
}

std::shared_ptr<NodeImpl> make_model(const ModelSpec& spec) {
  auto model = std::make_shared<NodeImpl>(spec.root, spec.width);
  model->to(torch::kDouble);
  const torch::NoGradGuard guard;
  auto generator = at::make_generator<at::CPUGeneratorImpl>(7);
  for (auto& entry : model->named_parameters()) {
    auto& parameter = entry.value();
    const bool is_scale = entry.key().ends_with("scale");
    parameter.copy_(torch::randn(parameter.sizes(), generator, torch::kDouble) * (is_scale ? 0.2 : 0.4));
    if (is_scale) parameter.add_(1);
  }
  return model;
}

} // namespace shardwise::test
