// Hooks of modules that containers call, after observe_calls().
#include <gtest/gtest.h>
#include <shardwise/shardwise.h>
#include <torch/torch.h>

#include <sstream>

namespace shardwise {
namespace {

using torch::nn::AnyModule;
using torch::nn::Linear;
using torch::nn::Module;
using torch::nn::ReLU;
using torch::nn::Sequential;

/// A Sequential in a module that can be a child of a Sequential.
struct BlockImpl : torch::nn::Cloneable<BlockImpl> {
  BlockImpl() {
    reset();
  }
  void reset() override {
    body = register_module("body", Sequential(Linear(3, 3), ReLU()));
  }
  at::Tensor forward(const at::Tensor x) {
    return x + body->forward(x);
  }
  Sequential body{nullptr};
};
TORCH_MODULE(Block);

struct DefaultsImpl : Module {
  at::Tensor forward(at::Tensor x, int factor = 3) {
    return x * factor;
  }

 protected:
  FORWARD_HAS_DEFAULT_ARGS({1, torch::nn::AnyValue(3)})
};
TORCH_MODULE(Defaults);

/// Takes what LSTM returns.
struct OutputOnlyImpl : Module {
  at::Tensor forward(std::tuple<at::Tensor, std::tuple<at::Tensor, at::Tensor>> x) {
    return std::get<0>(x);
  }
};
TORCH_MODULE(OutputOnly);

/// Module is not its first base, so the two have different addresses.
struct Elsewhere {
  virtual ~Elsewhere() = default;
  int64_t before = 77;
};
struct SecondBaseImpl : Elsewhere, Module {
  at::Tensor forward(at::Tensor x) {
    return x + before;
  }
};
TORCH_MODULE(SecondBase);

void count_calls(Module& module, int& calls) {
  register_forward_hook(module, [&calls](Module&, HookTensors&) { ++calls; });
}

TEST(Hooks, ChildrenOfASequentialFireOnceObserved) {
  Sequential net(Linear(3, 4), ReLU(), Linear(4, 2));
  const auto x = torch::randn({5, 3});
  const auto want = net->forward(x);
  std::string log;
  for (const auto& child : net->children()) {
    register_forward_pre_hook(*child, [&log, expected = child.get()](Module& module, HookTensors& inputs) {
      EXPECT_EQ(&module, expected);
      log += std::to_string(inputs.at(0).size(1));
    });
  }
  net->forward(x);
  EXPECT_EQ(log, "");
  observe_calls(*net);
  observe_calls(*net);
  EXPECT_TRUE(at::equal(net->forward(x), want));
  EXPECT_EQ(log, "344");

  register_forward_hook(*net->ptr(1), [](Module&, HookTensors& outputs) { outputs[0] = outputs[0] * 0; });
  EXPECT_TRUE(at::equal(net->forward(x), net->at<torch::nn::LinearImpl>(2).bias.expand({5, 2})));
  unobserve_calls(*net);
  log.clear();
  EXPECT_TRUE(at::equal(net->forward(x), want));
  EXPECT_EQ(log, "");
  observe_calls(*net);
  net->forward(x);
  EXPECT_EQ(log, "344");
}

TEST(Hooks, NestedSequentialsAndLaterChildren) {
  Sequential net(Linear(3, 3), Block(), Linear(3, 2));
  int inner = 0;
  int block = 0;
  auto& body = net->at<BlockImpl>(1).body;
  count_calls(*body->ptr(0), inner);
  count_calls(*net->ptr(1), block);
  observe_calls(*net);
  const auto x = torch::randn({5, 3});
  net->forward(x);
  EXPECT_EQ(inner, 1);
  EXPECT_EQ(block, 1);

  net->push_back(Linear(2, 2));
  int late = 0;
  count_calls(*net->ptr(3), late);
  net->forward(x);
  EXPECT_EQ(late, 0);
  observe_calls(*net);
  net->forward(x);
  EXPECT_EQ(late, 1);
  EXPECT_EQ(inner, 3);

  int whole = 0;
  count_calls(*net, whole);
  EXPECT_TRUE(at::equal(call(net, x), net->forward(x)));
  EXPECT_EQ(whole, 1);
  EXPECT_EQ(inner, 5);
}

TEST(Hooks, ObservedContainersKeepTypesNamesAndText) {
  Sequential net(
      {{"first", AnyModule(Linear(3, 4))}, {"second", AnyModule(SecondBase())}, {"third", AnyModule(Block())}});
  const auto first = net->ptr(0);
  std::ostringstream before;
  before << net;
  const auto children = net->named_children().keys();
  const auto parameters = net->named_parameters().keys();
  observe_calls(*net);
  std::ostringstream after;
  after << net;
  EXPECT_EQ(after.str(), before.str());
  EXPECT_EQ(net->named_children().keys(), children);
  EXPECT_EQ(net->named_parameters().keys(), parameters);
  EXPECT_EQ(net->ptr(0), first);
  EXPECT_EQ((*net)[0], first);
  EXPECT_EQ(&net->at<torch::nn::LinearImpl>(0), first.get());
  EXPECT_EQ(net->ptr<torch::nn::LinearImpl>(0), first);
  EXPECT_EQ(net->at<SecondBaseImpl>(1).before, 77);
  EXPECT_EQ(static_cast<Module*>(&net->at<SecondBaseImpl>(1)), net->ptr(1).get());
  EXPECT_THROW(net->at<torch::nn::ReLUImpl>(0), c10::Error);
  EXPECT_EQ(net->begin()->get<Linear>().ptr(), first);
}

TEST(Hooks, ObservedContainersSaveLoadCloneMoveAndExtend) {
  Sequential net(Linear(3, 3), Block());
  int calls = 0;
  count_calls(*net->ptr(0), calls);
  observe_calls(*net);
  const auto x = torch::randn({5, 3});
  const auto want = net->forward(x);
  EXPECT_EQ(calls, 1);

  std::stringstream file;
  torch::save(net, file);
  Sequential loaded(Linear(3, 3), Block());
  observe_calls(*loaded);
  torch::load(loaded, file);
  EXPECT_TRUE(at::equal(loaded->forward(x), want));

  const auto clone = std::dynamic_pointer_cast<torch::nn::SequentialImpl>(net->clone());
  EXPECT_TRUE(at::equal(clone->forward(x), want));
  EXPECT_NE(clone->ptr(0), net->ptr(0));
  EXPECT_NE(clone->ptr(0)->parameters()[0].data_ptr(), net->ptr(0)->parameters()[0].data_ptr());
  EXPECT_EQ(calls, 1);
  Block block;
  observe_calls(*block);
  EXPECT_TRUE(at::equal(std::dynamic_pointer_cast<BlockImpl>(block->clone())->forward(x), block->forward(x)));

  Sequential extended;
  extended->extend(*net);
  EXPECT_TRUE(at::equal(extended->forward(x), want));
  EXPECT_EQ(calls, 2);

  net->to(torch::kDouble);
  EXPECT_EQ(net->forward(x.to(torch::kDouble)).dtype(), torch::kDouble);
  EXPECT_EQ(calls, 3);
}

TEST(Hooks, ObservedModulesHaveDefaultArgumentsAndTuples) {
  Sequential net(Defaults(), torch::nn::LSTM(3, 4), OutputOnly());
  const auto x = torch::randn({2, 5, 3});
  const auto want = net->forward(x);
  observe_calls(*net);
  std::vector<size_t> seen;
  for (const auto& child : net->children()) {
    register_forward_pre_hook(*child, [&](Module&, HookTensors& inputs) { seen.push_back(inputs.size()); });
    register_forward_hook(*child, [&](Module&, HookTensors& outputs) { seen.push_back(outputs.size()); });
  }
  EXPECT_TRUE(at::equal(net->forward(x), want));
  EXPECT_EQ(seen, (std::vector<size_t>{1, 1, 1, 3, 3, 1}));
  EXPECT_TRUE(at::equal(net->forward(x, 3), want));
  EXPECT_THROW(net->forward(x, std::string("factor")), c10::Error);
}

TEST(Hooks, AnyModuleMembersAndTransformers) {
  AnyModule any{Linear(3, 2)};
  AnyModule empty;
  int calls = 0;
  count_calls(*any.ptr(), calls);
  observe_calls(any);
  observe_calls(empty);
  any.forward(torch::ones({3}));
  EXPECT_EQ(calls, 1);
  AnyModule copy = any;
  copy.forward(torch::ones({3}));
  EXPECT_EQ(calls, 2);
  unobserve_calls(any);
  any.forward(torch::ones({3}));
  EXPECT_EQ(calls, 2);

  torch::nn::Transformer transformer(torch::nn::TransformerOptions(4, 2).num_encoder_layers(1).num_decoder_layers(1));
  observe_calls(*transformer);
  int coders = 0;
  count_calls(*transformer->encoder.ptr(), coders);
  count_calls(*transformer->decoder.ptr(), coders);
  transformer->forward(torch::randn({3, 1, 4}), torch::randn({2, 1, 4}));
  EXPECT_EQ(coders, 2);
}

} // namespace
} // namespace shardwise
