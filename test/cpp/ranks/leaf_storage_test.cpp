#include "ranks/touch_refiller.h"

#include <gtest/gtest.h>

namespace shardwise::nn::test {
namespace {

TEST(LeafStorage, IsWrittenThroughAnAliasOfItsOwn) {
  const auto leaf = torch::ones({2, 3}).requires_grad_();
  group::LeafStorage storage(leaf);
  EXPECT_FALSE(storage.freed());
  const auto loss = (leaf * leaf).sum();
  storage.free();
  storage.free();
  EXPECT_TRUE(storage.freed());
  EXPECT_EQ(leaf.storage().data(), nullptr);
  EXPECT_NE(
      error_of([&] { storage.alias(); }).find("was about to be written while its memory is freed"), std::string::npos);
  const auto memory = at::zeros({64}, at::kByte);
  storage.refill(memory, 32);
  EXPECT_EQ(leaf.storage().nbytes(), 24);
  EXPECT_EQ(leaf.storage().data(), memory.data_ptr<uint8_t>() + 32);
  const auto alias = storage.alias();
  EXPECT_EQ(alias.sizes(), leaf.sizes());
  EXPECT_FALSE(alias.requires_grad());
  alias.fill_(3);
  storage.refill(at::zeros({64}, at::kByte));
  EXPECT_TRUE(at::equal(leaf.detach(), at::full({2, 3}, 3.0)));
  EXPECT_EQ(leaf._version(), 0);
  loss.backward();
  EXPECT_TRUE(at::equal(leaf.grad(), at::full({2, 3}, 6.0)));
}

TEST(LeafStorage, RefusesMemoryThatItCannotFree) {
  float memory[3] = {1, 2, 3};
  EXPECT_NE(error_of([&] { group::LeafStorage(torch::from_blob(memory, {3})); }).find("from_blob"), std::string::npos);
  EXPECT_NE(error_of([&] { group::LeafStorage{at::Tensor()}; }).find("undefined"), std::string::npos);
  EXPECT_NE(error_of([&] { group::LeafStorage(at::ones({2}).to_sparse()); }).find("no storage"), std::string::npos);
  const auto tensor = at::ones({2});
  group::LeafStorage(tensor).free();
  EXPECT_NE(error_of([&] { group::LeafStorage{tensor}; }).find("freed now"), std::string::npos);
  group::LeafStorage nothing(at::empty({0}));
  nothing.free();
  EXPECT_FALSE(nothing.freed());
}

} // namespace
} // namespace shardwise::nn::test
