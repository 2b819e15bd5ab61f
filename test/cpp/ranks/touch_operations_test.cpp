// The touch trigger under single operations.
#include "ranks/touch_refiller.h"
#include "support/ranks.h"

#include <gtest/gtest.h>

#include <barrier>

namespace shardwise::nn::test {
namespace {

TEST(Touch, ErrorsOfTheListenerReachTheCaller) {
  torch::nn::Linear linear(5, 3);
  const auto refiller = Refiller::watch(linear->parameters());
  const auto x = torch::randn({7, 5}).requires_grad_();
  const auto code = [&](const auto& run) {
    refiller->error = UserError{42};
    int caught = 0;
    try {
      run();
    } catch (const UserError& error) {
      caught = error.code;
    }
    refiller->error.reset();
    return caught;
  };
  EXPECT_EQ(code([&] { linear->forward(x); }), 42);
  const auto output = linear->forward(x);
  refiller->free();
  EXPECT_EQ(code([&] { output.sum().backward(); }), 42);
  EXPECT_FALSE(x.grad().defined());
}

TEST(Touch, FreedLeavesAreNeverRead) {
  torch::nn::Linear linear(5, 3);
  auto refiller = Refiller::watch(linear->parameters());
  const auto x = torch::randn({7, 5}).requires_grad_();
  EXPECT_TRUE(group::is_freed(linear->weight.data()));
  for (const auto& other : {x, at::empty({0}), at::Tensor()}) EXPECT_FALSE(group::is_freed(other));
  refiller->refills = false;
  const auto lazy = error_of([&] { linear->forward(x); });
  for (const auto* part : {"aten::t ", "[3, 5]", "its unit did not gather it"}) {
    EXPECT_NE(lazy.find(part), std::string::npos) << lazy;
  }
  refiller->refills = true;
  const auto output = linear->forward(x);
  EXPECT_FALSE(group::is_freed(linear->weight));
  refiller->free();
  refiller.reset();
  const auto gone = error_of([&] { output.sum().backward(); });
  EXPECT_NE(gone.find("the unit that could gather it again is gone"), std::string::npos) << gone;
}

TEST(Touch, GraphsThatAreUsedTwice) {
  const auto leaf = torch::randn({4, 4}).requires_grad_();
  const auto want = leaf.detach().clone().requires_grad_();
  const auto x = torch::randn({4, 4}).requires_grad_();
  const auto refiller = Refiller::watch({leaf});
  const auto penalty = [&](const at::Tensor& weight, const auto& between) {
    const auto y = x.mm(weight).tanh().sum();
    between();
    const auto gradient = torch::autograd::grad({y}, {x}, {}, /*retain_graph=*/true, /*create_graph=*/true)[0];
    between();
    y.backward({}, /*retain_graph=*/true);
    between();
    gradient.pow(2).sum().backward();
    between();
  };
  penalty(leaf, [&] { refiller->free(); });
  penalty(want, [] {});
  EXPECT_TRUE(at::equal(leaf.grad(), want.grad()));
  EXPECT_EQ(refiller->refilled, 4);
}

TEST(Touch, EveryKindOfArgumentIsSeen) {
  auto leaf = torch::ones({3});
  const auto other = torch::ones({3});
  const auto index = torch::tensor({2, 0});
  const auto refiller = Refiller::watch({leaf});
  const auto indices = Refiller::watch({index});
  const auto seen = [](Refiller& by, const auto& run) {
    by.free();
    by.touches.clear();
    run();
    return by.touches;
  };
  using Names = std::vector<std::string>;
  EXPECT_EQ(seen(*refiller, [&] { EXPECT_TRUE(at::equal(other + leaf, at::full({3}, 2.0))); }), Names{"aten::add"});
  EXPECT_EQ(seen(*refiller, [&] { at::cat({other, leaf}); }), Names{"aten::cat"});
  EXPECT_EQ(seen(*refiller, [&] { at::_foreach_add({other, leaf, leaf}, 1); }), (Names(2, "aten::_foreach_add")));
  EXPECT_EQ(seen(*refiller, [&] { other.clone().copy_(leaf); }), Names{"aten::copy_"});
  EXPECT_EQ(seen(*refiller, [&] { EXPECT_TRUE(other.is_same(other.mul_(leaf))); }), Names{"aten::mul_"});
  EXPECT_EQ(seen(*refiller, [&] { EXPECT_TRUE(leaf.is_same(leaf.mul_(other))); }), Names{"aten::mul_ writes"});
  EXPECT_EQ(seen(*refiller, [&] { at::add_out(leaf, other, other); }), Names{"aten::add writes"});
  EXPECT_EQ(seen(*refiller, [&] { leaf.view({3, 1}); }), Names{"aten::view"});
  EXPECT_EQ(seen(*refiller, [&] { at::_foreach_zero_({other, leaf}); }), Names{"aten::_foreach_zero_ writes"});
  EXPECT_EQ(seen(*refiller, [&] { at::linear(at::ones({2, 3}), at::ones({3, 3}), leaf); }), Names{"aten::linear"});
  // The undefined index of the first dimension, and the keyed one of the second.
  EXPECT_EQ(seen(*indices, [&] { at::ones({2, 3}).index({torch::indexing::Slice(), index}); }), Names{"aten::index"});
  refiller->free();
  leaf.mul_(3);
  EXPECT_TRUE(at::equal(leaf, at::full({3}, 3.0)));
}

TEST(Touch, ViewsCarryTheKeyAndResultsDoNot) {
  const auto leaf = torch::randn({4, 4}).requires_grad_();
  const auto refiller = Refiller::watch({leaf});
  for (const auto& view : {leaf.t(), leaf.view({16}), leaf.slice(0, 1, 3), leaf.detach(), leaf.data()}) {
    EXPECT_TRUE(has_touch_key(view));
    refiller->free();
    refiller->touches.clear();
    EXPECT_TRUE(group::is_freed(view));
    EXPECT_EQ(view.sum().numel(), 1);
    EXPECT_EQ(refiller->touches, std::vector<std::string>{"aten::sum"});
  }
  for (const auto& result : {leaf.clone(), leaf + 1, leaf.to(at::kDouble), at::empty_like(leaf)}) {
    EXPECT_FALSE(has_touch_key(result));
  }
}

TEST(Touch, OtherTensorsAndMetadataAreNotTouches) {
  const auto leaf = torch::randn({4, 4}).requires_grad_();
  const auto refiller = Refiller::watch({leaf});
  const auto x = torch::randn({4, 4}).requires_grad_();
  x.mm(x).relu().sum().backward();
  EXPECT_EQ(leaf.sizes(), (std::vector<int64_t>{4, 4}));
  EXPECT_TRUE(leaf.is_contiguous() && leaf.is_leaf());
  leaf.requires_grad_(false).requires_grad_(true);
  leaf.register_hook([](const at::Tensor&) {});
  leaf.mutable_grad() = at::zeros({4, 4});
  EXPECT_TRUE(leaf.data().is_contiguous());
  EXPECT_TRUE(refiller->touches.empty());
  EXPECT_TRUE(refiller->freed());
}

TEST(Touch, T06SetDataDropsTheKey) {
  const auto leaf = torch::randn({4}).requires_grad_();
  const auto refiller = Refiller::watch({leaf});
  ASSERT_TRUE(has_touch_key(leaf));
  leaf.set_data(torch::ones({4}));
  EXPECT_FALSE(has_touch_key(leaf));
  EXPECT_TRUE(refiller->touches.empty());
  add_touch_key(leaf);
  EXPECT_TRUE(has_touch_key(leaf));
  EXPECT_THROW(add_touch_key(at::Tensor()), ValueError);
  EXPECT_FALSE(has_touch_key(at::Tensor()));

  torch::nn::Linear linear(2, 2);
  add_touch_key(linear->weight);
  linear->to(torch::kDouble);
  EXPECT_FALSE(has_touch_key(linear->weight));
}

TEST(Touch, AllArgumentsOfAnOperationAreThereWhenItRuns) {
  const auto a = torch::ones({3});
  const auto b = torch::ones({3});
  const auto first = Refiller::watch({a});
  const auto second = Refiller::watch({b});
  EXPECT_TRUE(at::equal(a + b, at::full({3}, 2.0)));
  EXPECT_EQ(first->refilled + second->refilled, 2);

  struct Rival : TouchListener {
    void touched(const Touch&) override {
      victim->free();
    }
    std::shared_ptr<Refiller> victim;
  };
  const auto rival = std::make_shared<Rival>();
  rival->victim = first;
  second->registration = TouchRegistration();
  const TouchRegistration registration(b, rival);
  EXPECT_NE(error_of([&] { a + b; }).find("aten::add.Tensor was about to use"), std::string::npos);
}

TEST(Touch, KeyedTensorsThatNobodyWatchesWork) {
  const auto dense = torch::ones({3});
  const auto sparse = torch::ones({3}).to_sparse();
  add_touch_key(dense);
  add_touch_key(sparse);
  EXPECT_TRUE(at::equal(dense + sparse, at::full({3}, 2.0)));
  EXPECT_TRUE(at::equal(sparse.to_dense(), at::ones({3})));
}

TEST(Touch, WhatAListenerDoesIsNotATouch) {
  struct Reader : TouchListener {
    void touched(const Touch& touch) override {
      ++calls;
      sum = touch.tensor.sum().item<double>();
    }
    int calls = 0;
    double sum = 0;
  };
  const auto leaf = torch::ones({3});
  add_touch_key(leaf);
  const auto reader = std::make_shared<Reader>();
  const TouchRegistration registration(leaf, reader);
  leaf.clone();
  EXPECT_EQ(reader->calls, 1);
  EXPECT_EQ(reader->sum, 3);
}

TEST(Touch, RegistrationsEnd) {
  const auto leaf = torch::ones({3});
  const auto refiller = Refiller::watch({leaf});
  const auto touches_of_one = [&] {
    refiller->touches.clear();
    leaf.clone();
    return refiller->touches.size();
  };
  EXPECT_EQ(touches_of_one(), 1);
  const auto other = Refiller::watch({torch::ones({2})});
  const auto second = error_of([&] { TouchRegistration(leaf, other); });
  EXPECT_NE(second.find("sizes [3] is watched by another listener already"), std::string::npos) << second;
  EXPECT_EQ(touches_of_one(), 1);
  {
    const TouchRegistration again(leaf, refiller);
    EXPECT_EQ(touches_of_one(), 1) << "it is told once";
  }
  EXPECT_EQ(touches_of_one(), 1);
  {
    const auto moved = std::move(refiller->registration);
    EXPECT_EQ(touches_of_one(), 1);
  }
  EXPECT_EQ(touches_of_one(), 0);
  refiller->registration = TouchRegistration(leaf, refiller);
  EXPECT_EQ(touches_of_one(), 1);
  refiller->registration = TouchRegistration();
  EXPECT_EQ(touches_of_one(), 0);
  EXPECT_THROW(TouchRegistration(at::Tensor(), refiller), ValueError);
  EXPECT_THROW(TouchRegistration(at::ones({2}).to_sparse(), refiller), ValueError);
}

TEST(Touch, AListenerMayEndItsRegistrationAndItself) {
  struct Once : TouchListener {
    explicit Once(int& calls) : calls(calls) {}
    void touched(const Touch&) override {
      const std::weak_ptr<Once> me = self;
      registration = TouchRegistration();
      self.reset();
      EXPECT_FALSE(me.expired());
      if (!me.expired()) ++calls;
    }
    std::shared_ptr<Once> self;
    TouchRegistration registration;
    int& calls;
  };
  const auto leaf = torch::ones({3});
  add_touch_key(leaf);
  int calls = 0;
  auto once = std::make_shared<Once>(calls);
  once->registration = TouchRegistration(leaf, once);
  const std::weak_ptr<Once> watch = once;
  once->self = std::move(once);
  leaf + leaf;
  EXPECT_EQ(calls, 1);
  EXPECT_TRUE(watch.expired());
}

TEST(Touch, RegistrationsComeAndGoInManyThreads) {
  struct Counter : TouchListener {
    void touched(const Touch&) override {
      ++calls;
    }
    int calls = 0;
  };
  std::barrier start(4);
  shardwise::test::run_ranks(4, [&](shardwise::test::Rank&) {
    const auto counter = std::make_shared<Counter>();
    Tensors leaves;
    for (int i = 0; i < 20; ++i) {
      leaves.push_back(torch::ones({1}));
      add_touch_key(leaves.back());
    }
    start.arrive_and_wait();
    for (int round = 0; round < 10000; ++round) {
      std::vector<TouchRegistration> registrations;
      for (const auto& leaf : leaves) registrations.emplace_back(leaf, counter);
      leaves[round % 20].t();
    }
    EXPECT_EQ(counter->calls, 10000);
  });
}

TEST(Touch, RegistrationsKeepNothingAlive) {
  auto leaf = torch::ones({3});
  auto refiller = Refiller::watch({leaf});
  const std::weak_ptr<Refiller> listener = refiller;
  const auto storage = leaf.storage().getWeakStorageImpl();
  const auto registration = std::move(refiller->registration);
  refiller.reset();
  EXPECT_TRUE(listener.expired());
  EXPECT_EQ(storage.use_count(), 1);
  leaf = at::Tensor();
  EXPECT_TRUE(storage.expired());
}

TEST(Touch, BackwardAsAnOperationIsSeenInside) {
  const auto leaf = torch::randn({3}).requires_grad_();
  const auto factor = torch::randn({3});
  const auto want = factor.clone();
  const auto refiller = Refiller::watch({leaf});
  const auto factors = Refiller::watch({factor});
  const auto loss = (leaf * factor).sum();
  refiller->free();
  factors->free();
  const auto backward = c10::Dispatcher::singleton().findSchemaOrThrow("aten::_backward", "");
  torch::jit::Stack stack{loss, Tensors{leaf}, c10::IValue(), c10::IValue(), false};
  backward.callBoxed(stack);
  EXPECT_TRUE(at::equal(leaf.grad(), want));
  EXPECT_TRUE(refiller->freed());
}

} // namespace
} // namespace shardwise::nn::test
