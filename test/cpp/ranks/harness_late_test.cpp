// The late network itself: results come late and are right, and those who do not wait are told.
#include "support/expect.h"
#include "support/late_network.h"
#include "support/ranks.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

namespace shardwise::test {
namespace {

using Complaints = std::vector<std::string>;
using Tensors = std::vector<at::Tensor>;

/// Of both ranks.
struct Ends {
  explicit Ends(LateNetwork& network, int group)
      : first(network.backend(group, 0)),
        second(network.backend(group, 1)) {}
  c10::intrusive_ptr<c10d::Backend> first, second;
};

at::Tensor row(std::vector<float> values) {
  return torch::tensor(values);
}

/// An all-gather of two ranks.
struct Gather {
  explicit Gather(LateNetwork& network, int group = 0) : ends(network, group) {}
  auto launch(int rank) {
    return (rank == 0 ? ends.first : ends.second)->_allgather_base(outputs[rank], inputs[rank]);
  }
  Ends ends;
  Tensors inputs{row({1, 2}), row({3, 4})};
  Tensors outputs{torch::ones(4), torch::ones(4)};
};

/// A reduce-scatter of two ranks.
struct Scatter {
  explicit Scatter(LateNetwork& network, int group = 0) : ends(network, group) {}
  auto launch(int rank) {
    return (rank == 0 ? ends.first : ends.second)->_reduce_scatter_base(outputs[rank], inputs[rank]);
  }
  Ends ends;
  Tensors inputs{row({1, 2}), row({3, 4})};
  Tensors outputs{torch::ones(1), torch::ones(1)};
};

} // namespace

TEST(HarnessLate, ResultsAreRightWhateverTheSeed) {
  for (uint64_t seed = 1; seed <= 50; ++seed) {
    LateNetwork network(2);
    for (const int rank : {0, 1}) network.be_late(rank, seed);
    Gather gather(network);
    Scatter scatter(network, 1);
    Tensors first{row({5, 6})};
    Tensors second{row({7, 8})};
    std::vector works{gather.launch(0), gather.launch(1), scatter.launch(0), scatter.launch(1)};
    works.push_back(gather.ends.first->allreduce(first));
    works.push_back(gather.ends.second->allreduce(second));
    for (const auto& work : works) {
      ASSERT_TRUE(work->wait());
      ASSERT_TRUE(work->isCompleted() && work->isSuccess());
    }
    for (const auto& output : gather.outputs) ASSERT_TRUE(torch::equal(output, row({1, 2, 3, 4})));
    ASSERT_TRUE(torch::equal(scatter.outputs[0], row({4})) && torch::equal(scatter.outputs[1], row({6})));
    ASSERT_TRUE(torch::equal(first[0], row({12, 14})) && torch::equal(second[0], row({12, 14})));
    first[0].fill_(9);
    works = {gather.ends.first->broadcast(first), gather.ends.second->broadcast(second)};
    for (const auto& work : works) work->wait();
    ASSERT_TRUE(torch::equal(second[0], row({9, 9})) && torch::equal(first[0], row({9, 9})));
    ASSERT_EQ(network.complaints(), Complaints());
  }
}

TEST(HarnessLate, OutputsAreNotNumbersUntilTheEnd) {
  LateNetwork network(2);
  Gather gather(network);
  const auto work = gather.launch(0);
  EXPECT_TRUE(gather.outputs[0].isnan().all().item<bool>());
  EXPECT_FALSE(work->isCompleted());
  EXPECT_ANY_THROW(work->wait(std::chrono::milliseconds(5)));
  // Read at the end.
  gather.inputs[0].fill_(7);
  gather.launch(1)->wait();
  work->wait();
  EXPECT_TRUE(torch::equal(gather.outputs[0], row({7, 7, 3, 4})));
}

TEST(HarnessLate, ResultsComeInEveryOrder) {
  LateNetwork network(2);
  constexpr int kSeeds = 200;
  for (uint64_t seed = 1; seed <= kSeeds; ++seed) {
    for (const int rank : {0, 1}) network.be_late(rank, seed);
    Gather first(network);
    Gather second(network, 1);
    for (const auto& work : {first.launch(0), first.launch(1), second.launch(0), second.launch(1)}) work->wait();
  }
  EXPECT_EQ(network.most_open(), 2);
  EXPECT_GT(network.overtaken(), 0);
  EXPECT_LT(network.overtaken(), kSeeds);
}

TEST(HarnessLate, ChangesOfMemoryInUseAreTold) {
  LateNetwork network(2);
  Scatter scatter(network);
  const auto first = scatter.launch(0);
  scatter.inputs[0].fill_(0);
  scatter.outputs[0].fill_(0);
  scatter.launch(1)->wait();
  first->wait();
  const std::string sum = "the reduce-scatter number 0 of group 0 had its ";
  EXPECT_EQ(network.complaints(), (Complaints{sum + "input changed on rank 0", sum + "output written on rank 0"}));
}

TEST(HarnessLate, FreedMemoryIsTold) {
  LateNetwork network(2);
  Gather gather(network);
  const auto first = gather.launch(0);
  gather.outputs[0].storage().unsafeGetStorageImpl()->set_nbytes(0);
  gather.launch(1)->wait();
  first->wait();
  EXPECT_EQ(network.complaints(), Complaints{"the all-gather number 0 of group 0 had its output freed on rank 0"});
}

TEST(HarnessLate, CallsThatDifferAreErrors) {
  LateNetwork network(2);
  Tensors two{row({1, 2})};
  Tensors one{row({1})};
  Ends ends(network, 0);
  const auto work = ends.first->allreduce(two);
  const std::string text = "the ranks do not call the all-reduce number 0 of group ";
  expect_error<std::exception>([&] { ends.second->allreduce(one); }, {text + "0 alike"});
  Ends others(network, 1);
  others.first->allreduce(one);
  expect_error<std::exception>([&] { others.second->broadcast(one); }, {text + "1 alike"});
  network.close();
  expect_error<std::exception>([&] { work->wait(); }, {"closed by peer"});
  expect_error<std::exception>([&] { ends.first->allreduce(one)->wait(); }, {"closed by peer"});
}

} // namespace shardwise::test
