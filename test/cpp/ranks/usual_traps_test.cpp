// What programs do around training and torch lets pass: each works, or is an error that names the remedy.
#include "ranks/state_models.h"
#include "support/expect.h"

#include <c10/util/Exception.h>

#include <sstream>

namespace shardwise::test {
namespace {

using Model = torch::nn::Sequential;

Model model_of(Rank& rank, const FullyShardOptions& options) {
  auto model = mlp({4, 4, 4});
  fully_shard(model->ptr(0), options);
  fully_shard(model, options);
  rank.step("wrapped");
  return model;
}

torch::Tensor trap_loss(Model& model, int step, int rank) {
  return model->forward(batch(step, rank, 4)).pow(2).mean();
}

std::vector<FullyShardOptions> all_layouts(Rank& rank) {
  return {
      sharded_on(rank), sharded_on(rank).layout(ShardLayout::flat),
      sharded_on(rank).mixed_precision(MixedPrecision().param_dtype(torch::kDouble)),
      FullyShardOptions().mesh(rank.mesh({{"copies", 1}, {"shards", rank.world_size()}}))};
}

/// What this thread was warned of.
struct Warnings : c10::WarningHandler {
  void process(const c10::Warning& warning) override {
    texts.push_back(warning.msg());
  }
  std::vector<std::string> texts;
  c10::WarningUtils::WarningHandlerGuard guard{this};
};

float read(const torch::Tensor& member) {
  return member.const_data_ptr<float>()[0];
}

} // namespace

TEST(RawReads, OfMembersFailOrAreCurrent) {
  // T50: never the values of before the step.
  run_ranks(2, [](Rank& rank) {
    for (const bool is_flat : {false, true}) {
      for (const bool kept : {true, false}) {
        const auto layout = is_flat ? ShardLayout::flat : ShardLayout::rows;
        auto ours = mlp({4, 4, 4});
        auto reference = mlp({4, 4, 4});
        auto inner = fully_shard(ours->ptr(0), sharded_on(rank).layout(layout).reshard_after_forward(!kept));
        auto outer = fully_shard(ours, sharded_on(rank).layout(layout).reshard_after_forward(!kept));
        for (auto* unit : {&inner, &outer}) unit->set_reshard_after_backward(!kept);
        const auto member = [](Model& model) { return model->at<torch::nn::LinearImpl>(0).weight; };
        Pair<Model> both{rank, ours, reference};
        const auto fails = [&] {
          const auto text = text_of([&] { read(member(ours)); });
          expect_text(text, {"shardwise: ", "'0.weight'", "freed or out of date", "unshard()"});
          ASSERT_EQ(text.find("Caffe2"), std::string::npos) << text;
          const auto weight = member(ours);
          expect_text(text_of([&] { weight.accessor<float, 2>(); }), {"'0.weight'"});
        };
        fails();
        for (int step = 0; step < 3; ++step) {
          both.backward(trap_loss, step);
          rank.step(c10::str("step ", step, is_flat ? " flat" : ""));
          if (kept) {
            ASSERT_EQ(read(member(ours)), read(member(reference)));
          }
          both.optimize();
          fails();
          if (step == 1) {
            inner.unshard();
            ASSERT_EQ(read(member(ours)), read(member(reference)));
          }
          // The begin of the unit is seen: its first use may be a raw one.
          float seen = 0;
          auto hook = register_forward_pre_hook(
              *ours->ptr(0), [&](torch::nn::Module&, HookTensors&) { seen = read(member(ours)); });
          const torch::NoGradGuard guard;
          ours->forward(batch(step, 0, 4));
          ASSERT_EQ(seen, read(member(reference)));
          hook.remove();
        }
        assert_state(full_state_dict(ours), plain_state(*reference), "the end");
      }
    }
  });
}

TEST(Traps, AnOptimizerFromBeforeWrapping) {
  run_ranks(2, [](Rank& rank) {
    const auto parts = std::vector<std::string>{c10::str("rank ", rank.rank()), "'0.weight'", "parameters()"};
    for (const auto& options : all_layouts(rank)) {
      auto ours = mlp({4, 4, 4});
      torch::optim::SGD sgd(ours->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
      torch::optim::AdamW adam(ours->parameters());
      fully_shard(ours->ptr(0), options);
      fully_shard(ours, options);
      const auto dtype = options.mixed_precision().param_dtype().value_or(torch::kFloat);
      for (auto* optimizer : std::initializer_list<torch::optim::Optimizer*>{&sgd, &adam}) {
        ours->forward(batch(0, rank.rank(), 4).to(dtype)).sum().backward();
        expect_error<Error>([&] { optimizer->step(); }, parts);
        expect_error<Error>([&] { optimizer->zero_grad(); }, parts);
      }
      // The one that is made afterwards trains.
      ours->zero_grad();
      if (options.layout() == ShardLayout::rows && dtype == torch::kFloat) {
        Pair<Model>{rank, ours, mlp({4, 4, 4})}.train(trap_loss, 3);
      }
    }
    Model cast = mlp({4, 4});
    torch::optim::SGD sgd(cast->parameters(), 0.1);
    replicate(cast, on(rank).mixed_precision(MixedPrecision().param_dtype(torch::kBFloat16)));
    cast->forward(batch(0, rank.rank(), 4)).sum().backward();
    expect_error<Error>([&] { sgd.step(); }, parts);
  });
}

TEST(Traps, MembersShowNoGradientInAForward) {
  // What stands there after a backward is gone when its unit is used, and is never added to anything.
  run_ranks(2, [](Rank& rank) {
    auto ours = model_of(rank, sharded_on(rank));
    const auto& member = ours->at<torch::nn::LinearImpl>(0).weight;
    Pair<Model> both{rank, ours, mlp({4, 4, 4})};
    for (int step = 0; step < 3; ++step) {
      ASSERT_EQ(member.grad().defined(), step > 0);
      if (step > 0) expect_error<Error>([&] { member.grad().norm(); }, {"'0.weight'", "parameters()"});
      const auto loss = trap_loss(ours, step, rank.rank());
      ASSERT_FALSE(member.grad().defined());
      loss.backward();
      reference_backward(rank, [&](int r) { return trap_loss(both.reference, step, r); });
      both.finish(step);
    }
  });
}

TEST(Traps, TorchsClipping) {
  run_ranks(2, [](Rank& rank) {
    for (const auto& options : all_layouts(rank)) {
      if (options.mixed_precision().param_dtype()) continue;
      auto ours = model_of(rank, options);
      trap_loss(ours, 0, rank.rank()).backward();
      for (const double order : {2.0, 1.0, std::numeric_limits<double>::infinity()}) {
        expect_error<Error>(
            [&] { torch::nn::utils::clip_grad_norm_(ours->parameters(), 1e-3, order); },
            {"shard", "shardwise::clip_grad_norm_", "all-reduce"});
      }
      // Nothing was changed, and ours works. So does a program that lets the ranks exchange what it computed.
      auto reference = mlp({4, 4, 4});
      reference_backward(rank, [&](int r) { return trap_loss(reference, 0, r); });
      {
        const torch::NoGradGuard guard;
        auto sum = torch::zeros({});
        for (const auto& parameter : ours->parameters()) sum += parameter.grad().norm().pow(2);
        std::vector<at::Tensor> all{sum};
        rank.mesh().group("world")->allreduce(all)->wait();
        const auto scale = 1e-2 / all[0].sqrt();
        for (const auto& parameter : ours->parameters()) parameter.grad().mul_(scale);
      }
      auto norm = 0.0;
      for (const auto& parameter : reference->parameters()) norm += parameter.grad().pow(2).sum().item<double>();
      for (const auto& parameter : reference->parameters()) parameter.grad().mul_(1e-2 / std::sqrt(norm));
      if (options.layout() == ShardLayout::rows) assert_pieces(*ours, *reference, rank, "by hand");
      clip_grad_norm_(ours, 1e-3);
    }
    // Whole gradients are the same on all ranks: torch's clipping is right.
    auto replicated = mlp({4, 4});
    replicate(replicated, on(rank));
    trap_loss(replicated, 0, rank.rank()).backward();
    torch::nn::utils::clip_grad_norm_(replicated->parameters(), 1e-3);
  });
  run_ranks(1, [](Rank& rank) {
    auto ours = model_of(rank, sharded_on(rank));
    trap_loss(ours, 0, 0).backward();
    torch::nn::utils::clip_grad_norm_(ours->parameters(), 1e-3);
  });
}

TEST(Traps, LBFGS) {
  run_ranks(2, [](Rank& rank) {
    auto ours = model_of(rank, sharded_on(rank));
    torch::optim::LBFGS optimizer(ours->parameters(), torch::optim::LBFGSOptions(0.1));
    expect_error<Error>(
        [&] {
          optimizer.step([&] {
            optimizer.zero_grad();
            auto loss = trap_loss(ours, 0, rank.rank());
            loss.backward();
            return loss;
          });
        },
        {c10::str("rank ", rank.rank()), "torch::optim::LBFGS", "element by element"});
  });
}

TEST(Traps, ReadingANumberOfOneRank) {
  c10::WarningUtils::set_warnAlways(true);
  run_ranks(2, [](Rank& rank) {
    Warnings warnings;
    auto ours = model_of(rank, sharded_on(rank));
    Pair<Model>{rank, ours, mlp({4, 4, 4})}.train(trap_loss, 1);
    ASSERT_EQ(warnings.texts.size(), 0);
    const auto parameter = ours->parameters()[0];
    std::ignore = parameter.detach().norm().item<float>();
    ASSERT_EQ(warnings.texts.size(), 1);
    expect_text(warnings.texts[0], {"computed from this rank's shards alone", "clip_grad_norm_()"});
    // A loss with a penalty, and one element.
    std::ignore = (trap_loss(ours, 0, rank.rank()) + parameter.pow(2).sum()).item<float>();
    std::ignore = parameter.detach()[0][0].item<float>();
    ASSERT_EQ(warnings.texts.size(), 1);
  });
  c10::WarningUtils::set_warnAlways(false);
}

TEST(Traps, ParametersToVector) {
  run_ranks(2, [](Rank& rank) {
    Warnings warnings;
    auto ours = model_of(rank, sharded_on(rank));
    for (int i = 0; i < 3; ++i) torch::nn::utils::parameters_to_vector(ours->parameters());
    ASSERT_EQ(warnings.texts.size(), 1);
    expect_text(warnings.texts[0], {"'0.weight'", "parameters_to_vector", "full_state_dict()"});
    // What else a program does with shards warns of nothing.
    Pair<Model>{rank, ours, mlp({4, 4, 4})}.train(trap_loss, 3);
    ASSERT_EQ(warnings.texts.size(), 1);
  });
}

TEST(Traps, MembersThatAreFrozen) {
  // The parameter follows whichever of the two was changed.
  run_ranks(2, [](Rank& rank) {
    for (const bool kept : {false, true}) {
      auto ours = model_of(rank, sharded_on(rank).reshard_after_forward(!kept));
      if (kept) unit(*ours).set_reshard_after_backward(false);
      Pair<Model> both{rank, ours, mlp({4, 4, 4})};
      const auto freeze = [&](bool by_member, bool trained) {
        both.reference->at<torch::nn::LinearImpl>(2).weight.requires_grad_(trained);
        const auto shard = both.ours->named_parameters()["2.weight"];
        const auto member = both.ours->at<torch::nn::LinearImpl>(2).weight;
        (by_member ? member : shard).requires_grad_(trained);
        both.train(trap_loss, 2);
        ASSERT_EQ(shard.requires_grad(), trained);
        ASSERT_EQ(member.requires_grad(), trained);
      };
      both.train(trap_loss, 2);
      for (const bool first : {true, false}) {
        for (const bool second : {true, false}) {
          freeze(first, false);
          freeze(second, true);
        }
      }
    }
  });
}

TEST(Traps, AnOptimizersArchiveOfWholeParameters) {
  run_ranks(2, [](Rank& rank) {
    auto plain = mlp({4, 4, 4});
    torch::optim::Adam whole(plain->parameters());
    trap_loss(plain, 0, 0).backward();
    whole.step();
    std::stringstream archive;
    torch::save(whole, archive);
    for (const auto& options : {sharded_on(rank), sharded_on(rank).layout(ShardLayout::flat)}) {
      auto ours = model_of(rank, options);
      torch::optim::Adam optimizer(ours->parameters());
      archive.clear();
      archive.seekg(0);
      torch::load(optimizer, archive);
      trap_loss(ours, 0, rank.rank()).backward();
      expect_error<Error>(
          [&] { optimizer.step(); },
          {c10::str("rank ", rank.rank()), "'0.weight'", "[4, 4]", "whole parameter", "torch says: "});
    }
  });
}

TEST(Traps, AnArchiveOfShardsInAPlainModule) {
  // Its pieces are of one size on all ranks: nothing else would see it.
  run_ranks(2, [](Rank& rank) {
    for (const auto& options : {sharded_on(rank), sharded_on(rank).layout(ShardLayout::flat)}) {
      std::stringstream archive;
      torch::save(model_of(rank, options), archive);
      auto plain = mlp({4, 4, 4});
      torch::load(plain, archive);
      const std::vector<std::string> parts{"'0.weight'", "[4, 4]", "archive of shards", "load_full_state_dict()"};
      expect_error<Error>([&] { fully_shard(plain, options); }, parts);
      expect_error<Error>([&] { replicate(plain, on(rank)); }, parts);
    }
    // A weight that a program made smaller itself.
    auto pruned = mlp({4, 4});
    auto& weight = pruned->at<torch::nn::LinearImpl>(0).weight;
    weight.set_data(weight.detach().narrow(0, 0, 2).clone());
    replicate(pruned, on(rank));
  });
}

} // namespace shardwise::test
