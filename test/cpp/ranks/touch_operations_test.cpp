// The touch trigger under single operations.
#include "base/compute_guard.h"
#include "group/leaf_storage.h"
#include "nn/touch/touch.h"
#include "support/expect.h"
#include "support/ranks.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <barrier>

namespace shardwise::nn::test {
namespace {

using shardwise::test::expect_text;
using shardwise::test::text_of;
using Tensors = std::vector<at::Tensor>;

/// Keeps the values of some tensors elsewhere, as an engine that shards does: the tensors become views of one buffer
/// whose memory is freed, and comes back with the values at the first touch.
class Refiller : public TouchListener {
 public:
  explicit Refiller(Tensors leaves) : leaves_(std::move(leaves)) {
    at::NoGradGuard no_grad;
    Tensors parts;
    for (const auto& leaf : leaves_) parts.push_back(leaf.reshape(-1));
    values_ = at::cat(parts).clone();
    storage_.emplace(values_.sizes(), values_.options());
    buffer_ = storage_->alias();
    int64_t offset = 0;
    for (auto& leaf : leaves_) {
      leaf.set_data(buffer_.narrow(0, offset, leaf.numel()).view(leaf.sizes()));
      offset += leaf.numel();
      add_touch_key(leaf);
    }
    storage_->free();
  }

  static std::shared_ptr<Refiller> watch(Tensors leaves) {
    auto refiller = std::make_shared<Refiller>(std::move(leaves));
    refiller->registration = TouchRegistration(refiller->buffer_, refiller);
    return refiller;
  }

  bool touched(const Touch& touch) override {
    touches.push_back(touch.operation.operator_name().name + (touch.written ? " writes" : ""));
    if (!refills || !storage_->freed()) return false;
    const base::ComputeGuard guard;
    storage_->refill(at::zeros({static_cast<int64_t>(storage_->bytes())}, values_.options().dtype(at::kByte)));
    storage_->alias().copy_(values_);
    ++refilled;
    return false;
  }

  /// Clears the memory too: the allocator may give the same piece again.
  void free() {
    if (storage_->freed()) return;
    const base::ComputeGuard guard;
    storage_->alias().zero_();
    storage_->free();
  }

  std::vector<std::string> touches;
  bool refills = true;
  int refilled = 0;
  TouchRegistration registration;

 private:
  Tensors leaves_;
  at::Tensor values_;
  at::Tensor buffer_;
  std::optional<group::LeafStorage> storage_;
};

TEST(Touch, FreedLeavesAreNeverRead) {
  torch::nn::Linear linear(5, 3);
  auto refiller = Refiller::watch(linear->parameters());
  const auto x = torch::randn({7, 5}).requires_grad_();
  EXPECT_TRUE(group::is_freed(linear->weight.data()));
  for (const auto& other : {x, at::empty({0}), at::Tensor()}) EXPECT_FALSE(group::is_freed(other));
  refiller->refills = false;
  const auto lazy = text_of([&] { linear->forward(x); });
  expect_text(lazy, {"aten::t ", "[3, 5]", "its unit did not gather it"});
  refiller->refills = true;
  const auto output = linear->forward(x);
  EXPECT_FALSE(group::is_freed(linear->weight));
  refiller->free();
  refiller.reset();
  const auto gone = text_of([&] { output.sum().backward(); });
  expect_text(gone, {"the unit that could gather it again is gone"});
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

TEST(Touch, AllArgumentsOfAnOperationAreThereWhenItRuns) {
  const auto a = torch::ones({3});
  const auto b = torch::ones({3});
  const auto first = Refiller::watch({a});
  const auto second = Refiller::watch({b});
  EXPECT_TRUE(at::equal(a + b, at::full({3}, 2.0)));
  EXPECT_EQ(first->refilled + second->refilled, 2);

  struct Rival : TouchListener {
    bool touched(const Touch&) override {
      victim->free();
      return false;
    }
    std::shared_ptr<Refiller> victim;
  };
  const auto rival = std::make_shared<Rival>();
  rival->victim = first;
  second->registration = TouchRegistration();
  const TouchRegistration registration(b, rival);
  expect_text(text_of([&] { a + b; }), {"aten::add.Tensor was about to use"});
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
  const auto second = text_of([&] { TouchRegistration(leaf, other); });
  expect_text(second, {"sizes [3] is watched by another listener already"});
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
    bool touched(const Touch&) override {
      const std::weak_ptr<Once> me = self;
      registration = TouchRegistration();
      self.reset();
      EXPECT_FALSE(me.expired());
      if (!me.expired()) ++calls;
      return false;
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
    bool touched(const Touch&) override {
      ++calls;
      return false;
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

} // namespace
} // namespace shardwise::nn::test
