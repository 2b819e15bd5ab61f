#pragma once

// What the tests of the checkpoint's contract share.
#include "support/ranks.h"

#include <gtest/gtest.h>
#include <shardwise/shardwise.h>
#include <torch/torch.h>

namespace shardwise::test {
using torch::Tensor;
using Tensors = std::vector<Tensor>;

inline Tensor leaf(at::IntArrayRef sizes) {
  return torch::randn(sizes).requires_grad_();
}

/// The text of the error that run() raises; torch's own have more to say, so no more is asked of it.
inline std::string text_of(const std::function<void()>& run) {
  try {
    run();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "no error";
}

/// x * w, and how often it ran.
struct Product {
  Tensor w = leaf({3, 3});
  std::shared_ptr<int> runs = std::make_shared<int>(0);
  Tensor operator()(const Tensor& x) const {
    ++*runs;
    return x.matmul(w).tanh();
  }
};

} // namespace shardwise::test
