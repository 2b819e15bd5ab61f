// What docs/cpp.md tells programs to do, line by line.
#include "ranks/state_models.h"

namespace shardwise::test {
namespace {

using Model = torch::nn::Sequential;

torch::Tensor loss_of(Model& model, const torch::Tensor& x) {
  return model->forward(x).pow(2).mean();
}

torch::Tensor step_loss(Model& model, int step, int rank) {
  return loss_of(model, batch(step, rank, 4));
}

} // namespace

TEST(Holders, MayBeConst) {
  run_ranks(2, [](Rank& rank) {
    const auto model = mlp({4, 4});
    const std::shared_ptr<torch::nn::Module> pointer = model.ptr();
    const torch::nn::Module& plain = *pointer;
    estimate_memory(model, sharded_on(rank), 2);
    fully_shard(model, sharded_on(rank));
    to_empty(model);
    const auto state = full_state_dict(model);
    ASSERT_EQ(full_state_dict(plain).size(), state.size());
    ASSERT_EQ(full_state_dict(pointer).size(), state.size());
    load_full_state_dict(model, state);
    load_full_state_dict(pointer, state);
    const auto root = unit(model);
    ASSERT_EQ(root.plan().units.size(), unit(pointer).plan().units.size());
    model.ptr()->forward(batch(0, rank.rank(), 4)).sum().backward();
    const auto norm = clip_grad_norm_(model, 1.0).item<double>();
    ASSERT_GT(norm, 0);
    ASSERT_LT(clip_grad_norm_(plain, 1.0).item<double>(), 1.1);
    const auto copy = mlp({4, 4});
    replicate(copy, on(rank));
  });
}

TEST(MeshValues, BarrierMeanAndAny) {
  on_ranks([](Rank& rank) {
    for (auto& mesh : {rank.mesh(), rank.mesh({{"copies", 1}, {"shards", rank.world_size()}})}) {
      const auto mean_of_ranks = (rank.world_size() - 1) / 2.0;
      mesh.barrier();
      ASSERT_DOUBLE_EQ(mesh.mean(rank.rank()), mean_of_ranks);
      const auto value = torch::full({2, 3}, rank.rank(), torch::kFloat).requires_grad_();
      const auto mean = mesh.mean(value);
      assert_close(mean, torch::full({2, 3}, mean_of_ranks, torch::kFloat), "mean");
      ASSERT_FALSE(mean.requires_grad());
      ASSERT_EQ(value[0][0].item<float>(), rank.rank());
      ASSERT_TRUE(mesh.any(rank.rank() == 1));
      ASSERT_FALSE(mesh.any(false));
      expect_error<ValueError>([&] { mesh.mean(torch::ones({2}, torch::kLong)); }, {"Mesh::mean()", "floating-point"});
    }
  });
}

TEST(MeshValues, NameWhatFailed) {
  run_ranks(2, [](Rank& rank) {
    const Mesh mesh({{"world", 2}}, rank.mesh_options("own").timeout(std::chrono::milliseconds(300)));
    // The other one does not come.
    if (rank.rank() == 0) expect_error<PeerError>([&] { mesh.barrier(); }, {"rank 0", "Mesh::barrier()"});
    rank.mesh().barrier();
  });
}

TEST(Uneven, RanksWithMoreBatches) {
  // The mean is over all ranks: whoever has no batch adds nothing to it.
  on_ranks([](Rank& rank) {
    for (const bool sharded : {true, false}) {
      auto ours = mlp({4, 4, 2});
      auto reference = mlp({4, 4, 2});
      sharded ? fully_shard(ours, sharded_on(rank)) : replicate(ours, on(rank));
      Pair<Model> both{rank, ours, reference};
      const auto count_of = [](int r) { return 2 + r; };
      std::vector<torch::Tensor> batches;
      for (int step = 0; step < count_of(rank.rank()); ++step) batches.push_back(batch(step, rank.rank(), 4));
      int step = 0;
      const auto steps = for_each_batch(rank.mesh(), batches, [&](const torch::Tensor& x, double weight) {
        ASSERT_EQ(weight, step < count_of(rank.rank()) ? 1 : 0);
        (weight * loss_of(ours, x)).backward();
        for (int r = 0; r < rank.world_size(); ++r) {
          if (step < count_of(r)) (step_loss(reference, step, r) / rank.world_size()).backward();
        }
        both.optimize();
        ++step;
      });
      ASSERT_EQ(steps, count_of(rank.world_size() - 1));
      assert_state(full_state_dict(ours), plain_state(*reference), "after all batches");
    }
  });
}

TEST(Uneven, ARankWithoutBatches) {
  run_ranks(2, [](Rank& rank) {
    std::vector<int> batches;
    if (rank.rank() == 0) batches.push_back(1);
    const auto none = [](int, double) { FAIL(); };
    expect_error<Error>(
        [&] { for_each_batch(rank.mesh(), batches, none); },
        {c10::str("rank ", rank.rank()),
         rank.rank() == 0 ? "another rank has no batch at all" : "this rank has no batch at all"});
    batches.clear();
    ASSERT_EQ(for_each_batch(rank.mesh(), batches, none), 0);
  });
}

TEST(Errors, GiveTheirReasonOnce) {
  run_ranks(2, [](Rank& rank) {
    auto model = mlp({4, 4});
    fully_shard(model, sharded_on(rank));
    // What comes is known by then, and is not compared any more: it is a sum that fails.
    for (int step = 0; step < 3; ++step) step_loss(model, step, rank.rank()).backward();
    const auto loss = step_loss(model, 3, rank.rank());
    if (rank.rank() == 1) return rank.close();
    try {
      loss.backward();
      FAIL() << "no error";
    } catch (const PeerError& error) {
      const std::string text = error.what();
      const std::string phrase = "The reason";
      const auto first = text.find(phrase);
      ASSERT_NE(first, std::string::npos) << text;
      ASSERT_EQ(text.find(phrase, first + 1), std::string::npos) << text;
      for (const auto* no : {"Details: ", "shardwise: "}) ASSERT_EQ(text.find(no, first), std::string::npos) << text;
      expect_text(text, {"rank 0", "rank 1", "reduce-scatter"});
    }
  });
}

} // namespace shardwise::test
