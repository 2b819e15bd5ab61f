// How far data travels inside the library: how many of its functions are called between torch, which announces a use or
// a gradient, and the collective or the tensor that it is for. Each is a function that a reader has to open.
#include "ranks/sharded_models.h"

#include <dlfcn.h>
#include <execinfo.h>

#include <array>
#include <string_view>

namespace shardwise::test::walks {
namespace {

/// The functions of the library, inlined ones not counted, that lead here from the last one of torch's.
int functions_on_the_way() {
  std::array<void*, 64> frames{};
  const int depth = backtrace(frames.data(), frames.size());
  int count = 0;
  for (int i = 0; i < depth; ++i) {
    Dl_info place{};
    const bool known = dladdr(frames.at(i), &place) != 0 && place.dli_fname != nullptr;
    if (known && std::string_view(place.dli_fname).find("libshardwise") != std::string_view::npos) {
      ++count;
    } else if (count > 0) {
      break;
    }
  }
  return count;
}

} // namespace

TEST(Walks, AreShort) {
  run_ranks(2, [](Rank& rank) {
    torch::nn::Linear model(5, 6);
    auto unit = fully_shard(model, sharded_on(rank));
    std::vector<int> to_gather;
    std::vector<int> to_sum;
    std::vector<int> to_gradient;
    unit.set_custom_all_gather([&](at::Tensor& output, at::Tensor& input, c10d::ProcessGroup& group) {
      to_gather.push_back(functions_on_the_way());
      return group._allgather_base(output, input);
    });
    unit.set_custom_reduce_scatter([&](at::Tensor& output, at::Tensor& input, c10d::ProcessGroup& group) {
      to_sum.push_back(functions_on_the_way());
      return group._reduce_scatter_base(output, input);
    });
    model->parameters()[0].register_hook([&](const torch::Tensor& gradient) {
      to_gradient.push_back(functions_on_the_way());
      return gradient;
    });
    for (int step = 0; step < 2; ++step) {
      torch::linear(batch(step, rank.rank(), 5), model->weight, model->bias).sum().backward();
    }
    ASSERT_FALSE(to_gather.empty() || to_sum.empty() || to_gradient.empty());
    for (const auto count : to_gather) EXPECT_LE(count, 10);
    for (const auto count : to_sum) EXPECT_LE(count, 9);
    // The two that run hooks on a shard are not on the way of others.
    for (const auto count : to_gradient) EXPECT_LE(count, 9 + 2);
  });
}

} // namespace shardwise::test::walks
