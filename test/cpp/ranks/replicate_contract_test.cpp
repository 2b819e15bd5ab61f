// replicate(): what it does besides averaging. The same rows as test/python/ranks/test_replicate_contract.py.
#include "ranks/fully_shard_models.h"
#include "ranks/gradient_record.h"
#include "support/expect.h"

namespace shardwise::test {
namespace {

torch::Tensor layers_loss_of(torch::nn::Sequential& model, int step, int rank) {
  return model->forward(batch(step, rank, 3)).pow(2).sum();
}

} // namespace

TEST(ReplicateContract, AFailedBackwardIsForgotten) {
  // T12: the first backward dies after some gradients came; the next is right, and .grad was left as it was.
  run_ranks(2, [](Rank& rank) {
    auto both = replicated_mlps(rank, {3, 4, 4, 2});
    auto& ours = both.ours;
    const auto step = [&](int number) {
      both.backward(layers_loss_of, number);
      both.check("step " + std::to_string(number));
    };
    step(0);
    auto hidden = torch::tanh(ours->ptr<torch::nn::LinearImpl>(0)->forward(batch(1, rank.rank(), 3)));
    hidden.register_hook([](const torch::Tensor&) -> torch::Tensor { throw std::runtime_error("on purpose"); });
    auto loss =
        ours->ptr<torch::nn::LinearImpl>(4)->forward(torch::tanh(ours->ptr<torch::nn::LinearImpl>(2)->forward(hidden)));
    expect_error<std::exception>([&] { loss.sum().backward(); }, {"on purpose"});
    both.check("after the failure");
    step(2);
    step(3);
  });
}

TEST(ReplicateContract, UsersHooks) {
  // T13: post-accumulate hooks see the mean, whenever they were registered; tensor hooks see the local gradient.
  run_ranks(2, [](Rank& rank) {
    auto both = pair_of_copies(rank, mlp({3, 4, 2}), mlp({3, 4, 2}));
    auto parameters = both.ours->named_parameters();
    std::vector<torch::Tensor> before;
    std::vector<torch::Tensor> after;
    record_gradients(parameters["0.weight"], before);
    replicate(both.ours, on(rank));
    record_gradients(parameters["2.weight"], after);
    both.each([](torch::nn::Sequential& model) {
      model->named_parameters()["0.bias"].register_hook([](const torch::Tensor& gradient) { return gradient * 2; });
    });
    const auto expected = both.reference->named_parameters();
    for (size_t step = 0; step < 3; ++step) {
      both.each([](torch::nn::Sequential& model) { model->zero_grad(); });
      both.backward(layers_loss_of, static_cast<int>(step));
      both.check("step " + std::to_string(step));
      ASSERT_EQ(before.size(), step + 1);
      ASSERT_EQ(after.size(), step + 1);
      ASSERT_TRUE(torch::allclose(before.back(), expected["0.weight"].grad()));
      ASSERT_TRUE(torch::allclose(after.back(), expected["2.weight"].grad()));
    }
  });
}

TEST(ReplicateContract, TwoModelsInOneBackward) {
  // T34: a generator is trained through a discriminator; each then also alone. Arrival orders differ by rank.
  run_ranks(2, [](Rank& rank) {
    auto make = mlp({2, 4, 3});
    auto judge = mlp({3, 4, 1});
    auto make_reference = mlp({2, 4, 3});
    auto judge_reference = mlp({3, 4, 1});
    auto make_unit = replicate(make, on(rank));
    auto judge_unit = replicate(judge, on(rank));
    const auto alone = [](auto& maker, auto& critic, int step, int r) {
      return critic->forward(maker->forward(batch(step, r, 2)).detach()).sum();
    };
    const auto together = [](auto& maker, auto& critic, int step, int r) {
      const auto loss = critic->forward(maker->forward(batch(step, r, 2))).sum();
      const auto bias = [](auto& model) { return model->named_parameters()["0.bias"].sum(); };
      return r == 0 ? loss + (bias(maker) + bias(critic)) : bias(critic) + bias(maker) + loss;
    };
    for (int step = 0; step < 3; ++step) {
      alone(make, judge, step, rank.rank()).backward();
      reference_backward(rank, [&](int r) { return alone(make_reference, judge_reference, step, r); });
      together(make, judge, step + 5, rank.rank()).backward();
      reference_backward(rank, [&](int r) { return together(make_reference, judge_reference, step + 5, r); });
      assert_same(*make, *make_reference, "step " + std::to_string(step));
      assert_same(*judge, *judge_reference, "step " + std::to_string(step));
    }
    ASSERT_EQ(make_unit.counters().all_reduces, 3);
    ASSERT_EQ(judge_unit.counters().all_reduces, 6);
  });
}

TEST(ReplicateContract, SeveralBackwardsOfOneGraph) {
  run_ranks(2, [](Rank& rank) {
    auto ours = mlp({3, 4, 2});
    auto reference = mlp({3, 4, 2});
    auto root = replicate(ours, on(rank));
    auto loss = ours->forward(batch(0, rank.rank(), 3)).pow(2).sum();
    loss.backward({}, /*retain_graph=*/true);
    loss.backward();
    for (int i = 0; i < 2; ++i) {
      reference_backward(rank, [&](int r) { return reference->forward(batch(0, r, 3)).pow(2).sum(); });
    }
    assert_same(*ours, *reference, "retain_graph");
    const auto before = root.counters().all_reduces;
    auto inputs = batch(1, rank.rank(), 3);
    const auto gradients = torch::autograd::grad({ours->forward(inputs).sum()}, ours->parameters());
    const auto local = torch::autograd::grad({reference->forward(inputs).sum()}, reference->parameters());
    for (size_t i = 0; i < local.size(); ++i) ASSERT_TRUE(torch::allclose(gradients[i], local[i]));
    assert_same(*ours, *reference, "autograd::grad leaves .grad alone");
    ASSERT_EQ(root.counters().all_reduces, before) << "autograd::grad averages nothing";
    ours->forward(inputs).sum().backward({}, std::nullopt, false, {{ours->named_parameters()["2.weight"]}});
    for (int r = 0; r < rank.world_size(); ++r) {
      (reference->forward(batch(1, r, 3)).sum() / rank.world_size())
          .backward({}, std::nullopt, false, {{reference->named_parameters()["2.weight"]}});
    }
    assert_same(*ours, *reference, "backward(inputs)");
  });
}

TEST(ReplicateContract, IgnoredParameters) {
  run_ranks(2, [](Rank& rank) {
    auto ours = mlp({3, 4, 2});
    auto reference = mlp({3, 4, 2});
    auto bias = ours->named_parameters()["0.bias"];
    replicate(ours, on(rank).ignored_parameters({bias}));
    ours->forward(batch(0, rank.rank(), 3)).pow(2).sum().backward();
    reference->forward(batch(0, rank.rank(), 3)).pow(2).sum().backward();
    ASSERT_TRUE(torch::allclose(bias.grad(), reference->named_parameters()["0.bias"].grad()));
    reference->zero_grad();
    reference_backward(rank, [&](int r) { return reference->forward(batch(0, r, 3)).pow(2).sum(); });
    ASSERT_TRUE(
        torch::allclose(ours->named_parameters()["0.weight"].grad(), reference->named_parameters()["0.weight"].grad()));
  });
}

TEST(ReplicateContract, ADeletedModelIsFreed) {
  // T23
  run_ranks(2, [](Rank& rank) {
    std::vector<c10::weak_intrusive_ptr<at::TensorImpl>> alive;
    {
      auto ours = mlp({3, 4, 2});
      auto handle = replicate(ours, on(rank));
      ours->forward(batch(0, rank.rank(), 3)).sum().backward();
      for (const auto& parameter : ours->parameters()) alive.emplace_back(parameter.getIntrusivePtr());
      ASSERT_FALSE(alive.front().expired());
      ours = nullptr;
      for (const auto& parameter : alive) ASSERT_TRUE(parameter.expired()) << "the handle keeps no parameter";
    }
  });
}

TEST(ReplicateContract, DifferentModulesAreAnError) {
  // Reliability 1.1, 7 and 8: equal shapes under other names, another dtype, frozen on one rank, another order.
  struct Named : torch::nn::Module {
    Named(const std::string& a, const std::string& b) {
      register_module(a, torch::nn::Linear(3, 3));
      register_module(b, torch::nn::Linear(3, 3));
    }
  };
  run_ranks(2, [](Rank& rank) {
    const bool first = rank.rank() == 0;
    Named swapped(first ? "b" : "a", first ? "a" : "b");
    expect_error<Error>(
        [&] { replicate(swapped, on(rank)); },
        {"wrap different modules", "'b.weight' float32 [3, 3] on rank 0", "'a.weight' float32 [3, 3] on rank 1",
         "rank " + std::to_string(rank.rank()), "same modules in the same order"});
    torch::nn::Linear cast(3, 3);
    if (!first) cast->to(torch::kFloat64);
    expect_error<Error>([&] { replicate(cast, on(rank)); }, {"'weight' float32", "'weight' float64"});
    torch::nn::Linear frozen(3, 3);
    frozen->weight.requires_grad_(first);
    expect_error<Error>([&] { replicate(frozen, on(rank)); }, {"frozen on rank 1"});
    torch::nn::Linear shaped(first ? 3 : 2, 3);
    expect_error<Error>(
        [&] { replicate(shaped, on(rank)); }, {"[3, 3] on rank 0, but 'weight' float32 [3, 2] on rank 1"});
    auto same = mlp({3, 4, 2});
    replicate(same, on(rank));
  });
}

TEST(ReplicateContract, MisuseIsAnError) {
  run_ranks(1, [](Rank& rank) {
    auto model = mlp({3, 4, 2});
    replicate(model, on(rank));
    expect_error<ValueError>([&] { replicate(model, on(rank)); }, {"can only be applied to a module once"});
    expect_error<ValueError>(
        [&] { replicate(*model->ptr(0), on(rank)); },
        {"a unit has parameters both inside and outside this module", "Wrap inner modules before outer ones"});
    torch::nn::Linear other(2, 2);
    expect_error<ValueError>([&] { unit(*other); }, {"LinearImpl has no unit"});
    expect_error<ValueError>(
        [&] {
          replicate(other, ReplicateOptions().mesh(rank.mesh({{"a", 1}, {"b", 1}})));
        },
        {"replicate expects a 1D DeviceMesh but got Mesh(a=1, b=1"});
    for (const bool sharded : {false, true}) {
      torch::nn::Embedding table(torch::nn::EmbeddingOptions(4, 3).sparse(true));
      sharded ? fully_shard(table, sharded_on(rank)) : replicate(table, on(rank));
      expect_error<Error>(
          [&] {
            table->forward(torch::tensor({1, 2})).sum().backward();
          },
          {"gradient of 'weight' has layout Sparse", "C++: EmbeddingOptions::sparse(false)", "ignored_parameters"});
    }
  });
}

TEST(ReplicateContract, LayersThatChangeTheirWeightAreAnError) {
  run_ranks(2, [](Rank& rank) {
    torch::nn::Sequential model(torch::nn::Embedding(torch::nn::EmbeddingOptions(4, 3).max_norm(1)));
    expect_error<ValueError>([&] { replicate(model, on(rank)); }, {"'0.weight' belongs to a layer with max_norm"});
    torch::nn::EmbeddingBag bag(torch::nn::EmbeddingBagOptions(4, 3).max_norm(1));
    expect_error<ValueError>([&] { replicate(bag, on(rank)); }, {"max_norm"});
    // What is ignored is the program's own business.
    replicate(model, on(rank).ignored_parameters({model->parameters()[0]}));
  });
}

TEST(ReplicateContract, AReplacedParameterIsAnError) {
  run_ranks(2, [](Rank& rank) {
    // One parameter of a unit is still used, another one is gone.
    struct Half : torch::nn::Module {
      Half() {
        weight = register_parameter("weight", torch::ones({3, 4}));
        child = register_module("child", torch::nn::Linear(4, 2));
      }
      torch::Tensor weight;
      torch::nn::Linear child{nullptr};
    };
    Half half;
    fill(half);
    replicate(half, on(rank));
    half.child = half.replace_module("child", torch::nn::Linear(4, 2));
    expect_error<Error>(
        [&] { half.child->forward(batch(0, rank.rank(), 3).matmul(half.weight)).sum().backward(); },
        {"'child.weight' was registered after replicate()"});
  });
}

TEST(ReplicateContract, LaterParametersAreAnError) {
  struct Growing : torch::nn::Module {
    torch::nn::Linear layer = register_module("layer", torch::nn::Linear(3, 4));
    torch::Tensor ignored = register_parameter("ignored", torch::ones({4}));
    torch::nn::Linear later{nullptr};
    torch::Tensor forward(const torch::Tensor& x) {
      const auto y = layer(x) * ignored;
      return later ? later(y) : y;
    }
  };
  for (const bool sharded : {false, true}) {
    run_ranks(2, [&](Rank& rank) {
      Growing model;
      fill(model);
      const std::vector<torch::Tensor> ignored{model.ignored};
      const auto loss = [&] { return model.forward(batch(0, rank.rank(), 3)).sum(); };
      sharded ? fully_shard(model, sharded_on(rank).ignored_parameters(ignored))
              : replicate(model, on(rank).ignored_parameters(ignored));
      loss().backward();
      model.later = model.register_module("later", torch::nn::Linear(4, 2));
      set_trained(*model.later, false);
      loss().backward();
      set_trained(*model.later, true);
      for (int i = 0; i < 2; ++i) {
        expect_error<Error>(
            [&] { loss().backward(); },
            {c10::str("rank ", rank.rank(), ": the parameter 'later.weight' was registered after"),
             "each would train it alone"});
      }
      replicate(model.later, on(rank));
      loss().backward();
    });
  }
  // Where the call is seen, so is the error at once.
  run_ranks(2, [](Rank& rank) {
    auto model = mlp({3, 4});
    fully_shard(model, sharded_on(rank));
    model->push_back(torch::nn::Linear(4, 2));
    expect_error<Error>([&] { call(*model, batch(0, rank.rank(), 3)); }, {"'1.weight' was registered after"});
  });
}

TEST(ReplicateContract, WorldOfOneIssuesNoCollective) {
  run_ranks(1, [](Rank& rank) {
    auto both = replicated_mlps(rank, {3, 4, 2});
    both.train(layers_loss_of, 3);
    const auto used = unit(*both.ours).counters();
    ASSERT_EQ(used.all_reduces + used.broadcasts + used.all_gathers, 0);
  });
}

TEST(ReplicateContract, PlanAndCounters) {
  run_ranks(2, [](Rank& rank) {
    auto model = mlp({4, 8, 2});
    auto root = replicate(model, on(rank).broadcast(false));
    const auto group = root.plan().units.at(0).groups.at(0);
    constexpr int64_t kElements = 4 * 8 + 8 + 8 * 2 + 2;
    ASSERT_EQ(group.elements, kElements);
    ASSERT_EQ(group.bytes, 4 * kElements);
    ASSERT_NE(root.plan().table().find(std::to_string(kElements)), std::string::npos);
    for (int step = 0; step < 4; ++step) {
      model->zero_grad();
      model->forward(batch(step, rank.rank(), 4)).sum().backward();
    }
    const auto used = root.counters();
    ASSERT_EQ(used.backwards, 4);
    ASSERT_EQ(used.all_reduces, 4);
    ASSERT_EQ(used.copied_bytes, 4 * group.bytes) << "each gradient is copied once a step";
    ASSERT_EQ(used.allocations, 1);
    constexpr int64_t kFingerprint = 16;
    ASSERT_EQ(used.collective_bytes, 4 * group.bucket_bytes + kFingerprint);
  });
}

TEST(ReplicateContract, BroadcastAtTheStart) {
  // Parameters and buffers of rank 0 everywhere, also those that are not contiguous; not with broadcast(false).
  run_ranks(3, [](Rank& rank) {
    const auto make = [](int of) {
      torch::nn::Sequential layers(torch::nn::Linear(3, 4), torch::nn::BatchNorm1d(4), torch::nn::Linear(4, 2));
      fill(*layers, of);
      torch::NoGradGuard guard;
      layers->named_buffers()["1.running_mean"].fill_(of + 1);
      auto* last = layers->ptr<torch::nn::LinearImpl>(2).get();
      last->weight.set_data(torch::randn({2, 8}, generator(of)).slice(1, 0, 8, 2));
      return layers;
    };
    const auto assert_made_by = [&](const torch::nn::Sequential& layers, int of) {
      const auto expected = make(of);
      assert_same(*layers, *expected, c10::str("those of rank ", of), assert_equal);
      assert_equal(
          layers->named_buffers()["1.running_mean"], expected->named_buffers()["1.running_mean"], "running_mean");
    };
    auto same = make(rank.rank());
    auto root = replicate(same, on(rank));
    ASSERT_EQ(root.counters().broadcasts, 6 + 3);
    assert_made_by(same, 0);
    auto untouched = make(rank.rank());
    replicate(untouched, on(rank).broadcast(false));
    assert_made_by(untouched, rank.rank());
  });
}

TEST(ReplicateContract, TakesAnyModule) {
  // T29, T30: a module on the stack whose members hide torch's functions; no shared_ptr to it exists.
  struct Awkward : torch::nn::Module {
    Awkward() {
      fill(*this);
    }
    torch::nn::Linear modules = register_module("modules", torch::nn::Linear(3, 3));
    torch::Tensor parameters = register_parameter("parameters", torch::zeros({3}));
    torch::nn::ModuleList list = register_module("list", torch::nn::ModuleList(torch::nn::Linear(3, 1)));
  };
  run_ranks(2, [](Rank& rank) {
    for (int life = 0; life < 3; ++life) {
      Awkward ours;
      Awkward reference;
      const auto forward = [](Awkward& model, const torch::Tensor& x) {
        return model.list->ptr<torch::nn::LinearImpl>(0)->forward(model.modules->forward(x) * model.parameters).sum();
      };
      replicate(*ours.list, on(rank));
      replicate(ours, on(rank));
      for (int step = 0; step < 3; ++step) {
        forward(ours, batch(step, rank.rank(), 3)).backward();
        reference_backward(rank, [&](int r) { return forward(reference, batch(step, r, 3)); });
        assert_same(ours, reference, "step " + std::to_string(step));
      }
    }
  });
}

TEST(ReplicateContract, WithoutAMesh) {
  // The mesh from the environment is made once and shared: by units, and with the program.
  run_processes(2, [](Rank& rank) {
    auto both = pair_of_copies(rank, mlp({3, 4, 2}), mlp({3, 4, 2}));
    replicate(*both.ours->ptr(0));
    replicate(both.ours);
    ASSERT_EQ(Mesh::current().rank(), rank.rank());
    ASSERT_THROW(Mesh::from_env(), ValueError);
    const auto device = Mesh::current().device();
    both.reference->to(device);
    const auto loss = [&](torch::nn::Sequential& model, int step, int r) {
      return model->forward(batch(step, r, 3).to(device)).sum();
    };
    for (int step = 0; step < 3; ++step) {
      both.backward(loss, step);
      both.check("step " + std::to_string(step));
    }
  });
}

} // namespace shardwise::test
