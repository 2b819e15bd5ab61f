#pragma once

#include <c10/util/StringUtil.h>
#include <torch/torch.h>

#include <stdexcept>
#include <string>

namespace shardwise::test {

/// What a random program asserts: raises std::runtime_error, on whatever rank.
inline void require(bool holds, const std::string& what) {
  if (!holds) throw std::runtime_error(what);
}

inline void require_close(const torch::Tensor& ours, const torch::Tensor& plain, const std::string& what) {
  require(ours.sizes() == plain.sizes(), c10::str(what, " has sizes ", ours.sizes(), ", not ", plain.sizes()));
  require(
      torch::allclose(ours, plain, 1e-7, 1e-9),
      c10::str(what, " differs; ours:\n", ours, "\nthe plain model's:\n", plain));
}

} // namespace shardwise::test
