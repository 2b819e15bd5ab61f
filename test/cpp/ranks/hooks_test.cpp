// Hooks of single calls: order, what they see and replace, handles, which module they belong to.
#include <gtest/gtest.h>
#include <shardwise/shardwise.h>
#include <torch/torch.h>

#include <new>
#include <thread>

namespace shardwise {
namespace {

using torch::nn::Linear;
using torch::nn::Module;

/// A module with a member named like a function of its base, and arguments and results of many types.
struct MixedImpl : Module {
  MixedImpl() {
    weight = register_parameter("weight", torch::ones({3}));
  }

  std::tuple<at::Tensor, std::vector<at::Tensor>> forward(
      const at::Tensor& x, std::optional<at::Tensor> y, const std::vector<at::Tensor>& more, int& counter,
      std::unique_ptr<int> factor) {
    ++counter;
    auto result = x * weight * *factor;
    if (y) result = result + *y;
    return {result, more};
  }

  at::Tensor weight;
  int modules = 0;
  int name = 0;
};
SHARDWISE_MODULE(Mixed);

struct CountImpl : Module {
  void forward() {
    ++calls;
  }
  int& forward(int& value) {
    return value;
  }
  int calls = 0;
};
SHARDWISE_MODULE(Count);

struct ThrowImpl : Module {
  at::Tensor forward(const at::Tensor&) {
    throw std::runtime_error("forward failed");
  }
};
TORCH_MODULE(Throw);

auto note(std::string& log, const char* word) {
  return [&log, word](Module&, HookTensors&) { log += word; };
}

TEST(Hooks, FireInOrderOfRegistrationAndPrependComesFirst) {
  Linear linear(3, 2);
  std::string log;
  register_forward_hook(*linear, note(log, "c"));
  register_forward_hook(*linear, note(log, "d"));
  register_forward_pre_hook(*linear, note(log, "b"));
  register_forward_pre_hook(*linear, note(log, "a"), HookOptions().prepend(true));
  register_forward_hook(*linear, note(log, "-"), ForwardHookOptions().prepend(true));
  const auto x = torch::randn({4, 3});
  EXPECT_TRUE(at::equal(call(linear, x), linear->forward(x)));
  EXPECT_EQ(log, "ab-cd");
  call(linear.ptr(), x);
  call(linear.get(), x);
  call(*linear, x);
  EXPECT_EQ(log, "ab-cdab-cdab-cdab-cd");
}

TEST(Hooks, SeeAndReplaceTensorsInAllArgumentsAndResults) {
  Mixed mixed;
  std::vector<size_t> seen;
  register_forward_pre_hook(*mixed, [&](Module& module, HookTensors& inputs) {
    EXPECT_EQ(&module, mixed.get());
    seen.push_back(inputs.size());
    EXPECT_FALSE(inputs[1].defined());
    inputs[1] = torch::full({3}, 5.0);
    inputs[3] = inputs[3] * 100;
  });
  register_forward_hook(*mixed, [&](Module&, HookTensors& outputs) {
    seen.push_back(outputs.size());
    outputs[0] = outputs[0] + 0.5;
  });
  const auto x = torch::ones({3});
  const std::vector<at::Tensor> more{torch::ones({1}), torch::ones({1})};
  int counter = 0;
  const auto [result, rest] = mixed(x, std::optional<at::Tensor>(), more, counter, std::make_unique<int>(2));
  EXPECT_EQ(seen, (std::vector<size_t>{4, 3}));
  EXPECT_TRUE(at::equal(result, torch::full({3}, 7.5)));
  EXPECT_EQ(rest[1].item<float>(), 100);
  EXPECT_EQ(more[1].item<float>(), 1);
  EXPECT_EQ(counter, 1);
}

TEST(Hooks, ResultsWithoutTensorsPassUntouched) {
  Count count;
  size_t tensors = 9;
  register_forward_hook(*count, [&](Module&, HookTensors& outputs) { tensors = outputs.size(); });
  count();
  EXPECT_EQ(count->calls, 1);
  EXPECT_EQ(tensors, 0U);
  int value = 7;
  int& same = count(value);
  EXPECT_EQ(&same, &value);
}

TEST(Hooks, AddingOrDroppingATensorIsAnError) {
  Linear linear(3, 2);
  auto handle = register_forward_pre_hook(*linear, [](Module&, HookTensors& inputs) { inputs.clear(); });
  EXPECT_THROW(call(linear, torch::ones({3})), ValueError);
  handle.remove();
  register_forward_hook(*linear, [](Module&, HookTensors& outputs) { outputs.emplace_back(); });
  EXPECT_THROW(call(linear, torch::ones({3})), ValueError);
  EXPECT_THROW(register_forward_hook(*linear, nullptr), ValueError);
}

TEST(Hooks, AHandleRemovesOnceAndItsDestructionDoesNot) {
  Linear linear(3, 2);
  int calls = 0;
  const auto captured = std::make_shared<int>(1);
  const auto hook = [&calls, captured](Module&, HookTensors&) { ++calls; };
  HookHandle kept;
  EXPECT_TRUE(kept.removed());
  {
    auto handle = register_forward_hook(*linear, hook);
    kept = handle;
  }
  EXPECT_FALSE(kept.removed());
  const auto owners = captured.use_count();
  call(linear, torch::ones({3}));
  EXPECT_EQ(calls, 1);
  kept.remove();
  EXPECT_EQ(captured.use_count(), owners - 1);
  kept.remove();
  EXPECT_TRUE(kept.removed());
  call(linear, torch::ones({3}));
  EXPECT_EQ(calls, 1);
}

TEST(Hooks, RemovalAndRegistrationInsideAHook) {
  Linear linear(3, 2);
  std::string log;
  HookHandle second;
  HookHandle first = register_forward_pre_hook(*linear, [&](Module& module, HookTensors&) {
    log += "1";
    first.remove();
    second.remove();
    register_forward_pre_hook(module, note(log, "n"));
    register_forward_hook(module, note(log, "f"));
  });
  second = register_forward_pre_hook(*linear, note(log, "2"));
  call(linear, torch::ones({3}));
  EXPECT_EQ(log, "1f");
  call(linear, torch::ones({3}));
  EXPECT_EQ(log, "1fnf");
}

TEST(Hooks, ExceptionsReachTheCallerAndAlwaysCallRuns) {
  Throw module;
  std::string log;
  register_forward_hook(*module, note(log, "n"));
  register_forward_hook(
      *module,
      [&](Module&, HookTensors& outputs) {
        EXPECT_TRUE(outputs.empty());
        log += "a";
      },
      ForwardHookOptions().always_call(true));
  register_forward_hook(
      *module, [](Module&, HookTensors&) { throw std::logic_error("only a warning"); },
      ForwardHookOptions().always_call(true));
  EXPECT_THROW(call(module, torch::ones({3})), std::runtime_error);
  EXPECT_EQ(log, "a");

  auto handle = register_forward_pre_hook(*module, [](Module&, HookTensors&) { throw std::out_of_range("pre"); });
  EXPECT_THROW(call(module, torch::ones({3})), std::out_of_range);
  EXPECT_EQ(log, "aa");
}

TEST(Hooks, AnAlwaysCalledHookThatRanDoesNotRunTwice) {
  Linear linear(3, 2);
  std::string log;
  register_forward_hook(*linear, note(log, "a"), ForwardHookOptions().always_call(true));
  register_forward_hook(*linear, [](Module&, HookTensors&) { throw std::out_of_range("hook"); });
  register_forward_hook(*linear, note(log, "b"), ForwardHookOptions().always_call(true));
  EXPECT_THROW(call(linear, torch::ones({3})), std::out_of_range);
  EXPECT_EQ(log, "ab");
}

TEST(Hooks, DoNotKeepModulesAliveNorPassToOthers) {
  std::string log;
  std::weak_ptr<Module> gone;
  {
    Linear linear(3, 2);
    gone = linear.ptr();
    register_forward_hook(*linear, note(log, "x"));
  }
  EXPECT_TRUE(gone.expired());
  for (int i = 0; i < 100; ++i) call(Linear(3, 2), torch::ones({3}));
  EXPECT_EQ(log, "");

  Linear linear(3, 2);
  register_forward_hook(*linear, note(log, "y"));
  const auto clone = std::dynamic_pointer_cast<torch::nn::LinearImpl>(linear->clone());
  call(clone, torch::ones({3}));
  EXPECT_EQ(log, "");
}

template <typename T>
void reuse_of_an_address() {
  alignas(T) std::byte memory[sizeof(T)];
  std::string log;
  HookHandle handle;
  for (int round = 0; round < 3; ++round) {
    auto* module = new (memory) T(3, 2);
    call(*module, torch::ones({3}));
    EXPECT_EQ(log, std::string(round, 'x'));
    handle = register_forward_hook(*module, note(log, "x"));
    call(*module, torch::ones({3}));
    EXPECT_EQ(log, std::string(round + 1, 'x'));
    EXPECT_THROW(static_cast<Module&>(*module).modules(), std::exception);
    module->~T();
  }
  handle.remove();
}

struct WithoutPartsImpl : Module {
  WithoutPartsImpl(int, int) {}
  at::Tensor forward(const at::Tensor& x) {
    return x;
  }
};

TEST(Hooks, ModulesOnTheStackAreKnownApart) {
  reuse_of_an_address<torch::nn::LinearImpl>();
  reuse_of_an_address<WithoutPartsImpl>();
}

/// Registers a hook before a shared_ptr owns it.
struct SelfHookedImpl : Module {
  explicit SelfHookedImpl(std::string* log) {
    linear = register_module("linear", Linear(3, 2));
    if (log != nullptr) register_forward_hook(*this, note(*log, "s"));
  }
  at::Tensor forward(const at::Tensor& x) {
    return linear(x);
  }
  Linear linear{nullptr};
};

TEST(Hooks, RegisteredInAConstructorGoOnUnderASharedPointer) {
  std::string log;
  const auto module = std::make_shared<SelfHookedImpl>(&log);
  call(module, torch::ones({3}));
  call(*module, torch::ones({3}));
  EXPECT_EQ(log, "ss");

  // One that dies without a call leaves nothing to the next at its address.
  struct Place {
    alignas(SelfHookedImpl) std::byte memory[sizeof(SelfHookedImpl)];
  } place;
  (new (place.memory) SelfHookedImpl(&log))->~SelfHookedImpl();
  auto* next = new (place.memory) SelfHookedImpl(nullptr);
  const std::shared_ptr<SelfHookedImpl> owner(next, [](SelfHookedImpl* self) { self->~SelfHookedImpl(); });
  call(owner, torch::ones({3}));
  EXPECT_EQ(log, "ss");
}

TEST(Hooks, OneModuleInManyThreads) {
  Linear linear(3, 2);
  std::atomic<int> calls{0};
  std::atomic<bool> stop{false};
  register_forward_hook(*linear, [&](Module&, HookTensors&) { ++calls; });
  std::thread changer([&] {
    while (!stop) register_forward_hook(*linear, [](Module&, HookTensors&) {}).remove();
  });
  std::vector<std::thread> threads;
  for (int i = 0; i < 3; ++i) {
    threads.emplace_back([&] {
      for (int round = 0; round < 200; ++round) call(linear, torch::ones({3}));
    });
  }
  for (auto& thread : threads) thread.join();
  stop = true;
  changer.join();
  EXPECT_EQ(calls, 600);
}

} // namespace
} // namespace shardwise
