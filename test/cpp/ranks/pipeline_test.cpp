// Pipeline: stages on ranks compute what one process computes, whatever the schedule.
#include "ranks/pipeline_models.h"
#include "support/expect.h"
#include "support/recorded_calls.h"

#include "group/leaf_storage.h"

namespace shardwise::test {
TEST(Pipeline, TrainsAsOneProcessInEverySchedule) {
  for (const int world : {1, 2, 3}) {
    for (const auto& each : kSchedules) {
      // Uneven microbatches: of two sizes.
      const int64_t microbatches = std::max<int64_t>(2 * world, 3);
      const int64_t rows = 2 * microbatches + 1;
      run_ranks(world, [&](Rank& rank) {
        rank.step("schedule " + std::to_string(static_cast<int>(each.schedule)));
        const auto mesh = rank.mesh({{"pp", world}});
        const auto options = options_of(each, microbatches);
        OwnStages stages;
        Pipeline pipeline(mesh, "pp", std::ref(stages), options);
        auto& own = stages.models;
        WholePipeline reference(pipeline.stages());
        auto mine = optimizer_of(parameters_of(own));
        auto theirs = optimizer_of(parameters_of(reference.models));
        for (int step = 0; step < 3; ++step) {
          mine->zero_grad();
          theirs->zero_grad();
          const auto x = rows_of(step, 0, rows);
          const auto y = rows_of(step, 5, rows);
          const bool is_first = own.contains(0);
          const bool is_last = own.contains(pipeline.stages() - 1);
          const auto result =
              pipeline.step(is_first ? StageTensors{x} : StageTensors(), is_last ? StageTensors{y} : StageTensors());
          const auto expected = mean_loss({reference.forward(x)}, {y});
          expected.backward();
          ASSERT_EQ(result.losses.size(), is_last ? microbatches : 0);
          if (is_last) {
            const auto parts = x.tensor_split(microbatches);
            const auto loss = mean_loss({reference.forward(parts[1])}, {y.tensor_split(microbatches)[1]});
            ASSERT_TRUE(torch::allclose(result.losses[1], loss, 1e-10, 1e-12));
          }
          assert_stages(own, reference, "before the optimizer");
          mine->step();
          theirs->step();
          assert_stages(own, reference, "step " + std::to_string(step));
          const auto seen = pipeline.evaluate(
              is_first ? StageTensors{x} : StageTensors(), is_last ? StageTensors{y} : StageTensors());
          ASSERT_EQ(seen.outputs.size(), is_last ? 1 : 0);
          if (is_last) {
            ASSERT_TRUE(torch::allclose(seen.outputs[0], reference.forward(x), 1e-9, 1e-11));
            ASSERT_FALSE(seen.outputs[0].requires_grad());
            ASSERT_EQ(seen.losses.size(), microbatches);
          }
        }
      });
    }
  }
}

TEST(Pipeline, UnitsGatherAndSumOnceAStep) {
  run_ranks(4, [&](Rank& rank) {
    const auto mesh = rank.mesh({{"pp", 2}, {"dp", 2}});
    for (const auto& each : kSchedules) {
      for (const bool once : {true, false}) {
        SCOPED_TRACE(c10::str("schedule ", static_cast<int>(each.schedule), ", gather once: ", once));
        std::vector<Mlp> own;
        auto options = options_of(each, 4).gather_once(once);
        Pipeline pipeline(
            mesh, "pp",
            [&](int64_t stage) {
              own.push_back(stage_model(stage));
              fully_shard(own.back()->in_proj, FullyShardOptions().mesh(mesh.along({"dp"})));
              fully_shard(own.back(), FullyShardOptions().mesh(mesh.along({"dp"})));
              return PipelineStage(own.back());
            },
            options);
        const auto x = rows_of(0, mesh.coordinate("dp"), 8);
        pipeline.step({x}, {x});
        // An optimizer makes full copies out of date.
        for (auto& model : own) torch::optim::SGD(model->parameters(), torch::optim::SGDOptions(0.1)).step();
        std::vector<Counters> before;
        for (auto& model : own) before.push_back(unit(model).counters());
        pipeline.step({x}, {x});
        for (size_t i = 0; i < own.size(); ++i) {
          EXPECT_TRUE(group::is_freed(own[i]->in_proj->weight));
          const auto after = unit(own[i]).counters();
          EXPECT_EQ(after.reduce_scatters - before[i].reduce_scatters, 2);
          const auto gathers = after.all_gathers - before[i].all_gathers;
          EXPECT_EQ(gathers == 2, once) << gathers;
          EXPECT_GE(gathers, 2);
        }
      }
    }
  });
}

TEST(Pipeline, NothingIsComputedTwice) {
  constexpr int kMicrobatches = 4;
  for (const auto& each : kSchedules) {
    for (const bool wraps : {false, true}) {
      SCOPED_TRACE(c10::str("schedule ", static_cast<int>(each.schedule), ", wraps: ", wraps));
      const auto x = [](const Rank& rank) { return rows_of(0, 0, 8).to(rank.device()); };
      const auto count = [](int ranks, const std::function<void(Rank&)>& act) {
        const RecordedCalls calls;
        run_ranks(ranks, act);
        return calls.products();
      };
      const auto mine = count(2, [&](Rank& rank) {
        const auto mesh = rank.mesh({{"pp", 2}, {"dp", 1}});
        const auto make = [&](int64_t stage) {
          const auto model = stage_model(stage);
          if (wraps) fully_shard(model, FullyShardOptions().mesh(mesh.along({"dp"})));
          return PipelineStage(model);
        };
        Pipeline pipeline(mesh, "pp", make, options_of(each, kMicrobatches));
        pipeline.step({x(rank)}, {x(rank)});
      });
      const auto whole = count(1, [&](Rank& rank) {
        WholePipeline model(2 * each.stages_per_rank);
        for (const auto& part : x(rank).chunk(kMicrobatches)) mean_loss({model.forward(part)}, {part}).backward();
      });
      EXPECT_GT(whole, 0);
      EXPECT_EQ(mine, whole);
    }
  }
}

TEST(Pipeline, TellsWhatItsStagesDidAndWhen) {
  start_record();
  run_ranks(2, [](Rank& rank) {
    OwnStages stages;
    Pipeline pipeline(rank.mesh({{"pp", 2}}), "pp", std::ref(stages), options_of(kSchedules[1], 4));
    // Of five turns, a forward and a backward each, a rank has four.
    for (const auto share : pipeline.bubble()) EXPECT_NEAR(share, 0.2, 1e-9);
    const auto result = pipeline.step({rows_of(0, 0, 8)}, {rows_of(0, 5, 8)});
    EXPECT_GT(result.busy_seconds, 0);
    EXPECT_LT(result.busy_seconds, result.seconds);
  });
  const auto record = stop_record();
  EXPECT_NE(record.find("\"kind\": \"step\""), std::string::npos) << record;
  for (const auto* action : {"0F0", "0F3", "0B2", "1F0", "1B3"}) {
    EXPECT_NE(record.find(c10::str("\"kind\": \"stage\", \"name\": \"", action, "\"")), std::string::npos) << record;
  }
}

TEST(Pipeline, StagesOfSeveralInputsAndOutputs) {
  run_ranks(3, [](Rank& rank) {
    const auto mesh = rank.mesh({{"pp", 3}});
    auto weight = torch::full({2}, 1.0 + rank.rank(), torch::kDouble).requires_grad_();
    // An output without a gradient, one that is undefined, and an input that nobody uses.
    const auto stage = [&](int64_t number) {
      return PipelineStage(
          [&weight, number](const StageTensors& inputs) -> StageTensors {
            if (number == 0) return {inputs[0] * weight, torch::arange(2), torch::Tensor(), inputs[0] + weight};
            EXPECT_FALSE(inputs[1].requires_grad());
            EXPECT_FALSE(inputs[2].defined());
            if (number == 1) return {inputs[0] * weight, inputs[1], inputs[2], inputs[3].detach()};
            return {inputs[0] * weight + inputs[1]};
          },
          nullptr);
    };
    Pipeline pipeline(mesh, "pp", stage, PipelineOptions().microbatches(2).loss([](auto& outputs, auto&) {
      return outputs[0].sum();
    }));
    const auto x = torch::randn({4, 2}, generator(3), torch::kDouble);
    pipeline.step({x});
    const auto others = 6.0 / (1.0 + rank.rank());
    EXPECT_TRUE(torch::allclose(weight.grad(), x.sum(0) * others / 2)) << weight.grad();
  });
}

TEST(Pipeline, MessagesMayDifferFromStepToStep) {
  struct Step {
    int64_t rows;
    bool doubles;
    bool fails = false;
    /// The rank that alone makes its pipeline anew before this step.
    int anew_on = -1;
  };
  for (const auto& each : {kSchedules[1], kSchedules[5]}) {
    run_ranks(2, [&](Rank& rank) {
      const auto last = 2 * each.stages_per_rank - 1;
      Step now{};
      Stages own;
      // In some steps stages send two tensors, which the next one adds up.
      const auto stage = [&](int64_t number) {
        own.emplace(number, stage_model(number));
        return PipelineStage(
            [&, number](const StageTensors& inputs) -> StageTensors {
              if (now.fails && number == 1) throw std::runtime_error("it is bad");
              const auto y = own.at(number)->forward(inputs.size() == 2 ? inputs[0] + inputs[1] : inputs[0]);
              return now.doubles && number < last ? StageTensors{y, 2 * y} : StageTensors{y};
            },
            own.at(number).ptr());
      };
      const auto mesh = rank.mesh({{"pp", 2}});
      std::optional<Pipeline> made(Pipeline(mesh, "pp", stage, options_of(each, 4)));
      for (const auto& step : std::vector<Step>{
               {8, false},
               {8, false},
               {12, true},
               {12, true, true},
               {9, false, true},
               {9, false},
               {12, true},
               {8, false, false, /*anew_on=*/1},
               {8, false},
               {12, true, false, /*anew_on=*/0}}) {
        now = step;
        if (step.anew_on == rank.rank()) {
          own.clear();
          made.reset();
          made.emplace(Pipeline(mesh, "pp", stage, options_of(each, 4)));
        }
        auto& pipeline = *made;
        const auto x = rows_of(0, 0, step.rows);
        const auto name = c10::str(step.rows, " rows, doubles: ", step.doubles);
        rank.step(name);
        for (auto& [number, model] : own) model->zero_grad();
        if (step.fails) {
          expect_error<Error>([&] { pipeline.step({x}, {x}); }, {"it is bad"});
          continue;
        }
        pipeline.step({x}, {x});
        WholePipeline reference(pipeline.stages());
        auto y = x;
        for (int64_t number = 0; number <= last; ++number) {
          y = reference.models.at(number)->forward(y) * (step.doubles && number < last ? 3 : 1);
        }
        mean_loss({y}, {x}).backward();
        assert_stages(own, reference, name);
        const auto seen = pipeline.evaluate({x.narrow(0, 0, 5)});
        if (!own.contains(last)) continue;
        EXPECT_TRUE(torch::allclose(seen.outputs[0], y.narrow(0, 0, 5), 1e-9, 1e-11)) << name;
      }
    });
  }
}

TEST(Pipeline, AnErrorOfOneStageIsRaisedOnAllAndTheNextStepGoesOn) {
  for (const auto& each : {kSchedules[1], kSchedules[4]}) {
    for (const bool in_backward : {false, true}) {
      run_ranks(2, [&](Rank& rank) {
        const auto mesh = rank.mesh({{"pp", 2}});
        bool fails = true;
        int64_t calls = 0;
        Stages own;
        const auto stage = [&](int64_t number) {
          own.emplace(number, stage_model(number));
          return PipelineStage(
              [&, number](const StageTensors& inputs) -> StageTensors {
                auto output = own.at(number)->forward(inputs[0]);
                if (number != 1 || !fails || ++calls != 2) return {output};
                if (!in_backward) throw std::runtime_error("the second microbatch is bad");
                output.register_hook(
                    [](const torch::Tensor&) -> torch::Tensor { throw std::runtime_error("its gradient is bad"); });
                return {output};
              },
              own.at(number).ptr());
        };
        Pipeline pipeline(mesh, "pp", stage, options_of(each, 4));
        const auto x = rows_of(0, 0, 8);
        expect_error<Error>(
            [&] { pipeline.step({x}, {x}); }, {"failed on all ranks along 'pp'", "rank 1",
                                               in_backward ? "its gradient is bad" : "the second microbatch is bad"});
        fails = false;
        for (auto& [number, model] : own) model->zero_grad();
        pipeline.step({x}, {x});
        WholePipeline reference(pipeline.stages());
        mean_loss({reference.forward(x)}, {x}).backward();
        assert_stages(own, reference, "the next step");
      });
    }
  }
}

TEST(Pipeline, WhatDoesNotFitIsAnErrorOnAllRanks) {
  run_ranks(2, [](Rank& rank) {
    const auto mesh = rank.mesh({{"pp", 2}});
    const auto stage = [](int64_t number) { return PipelineStage(stage_model(number)); };
    Pipeline pipeline(mesh, "pp", stage, options_of(kSchedules[1], 4));
    const auto x = rows_of(0, 0, 8);
    expect_error<Error>([&] { pipeline.step(); }, {"rank 0", "must give inputs"});
    expect_error<Error>([&] { pipeline.step({rows_of(0, 0, 3)}, {x}); }, {"rank 0", "[3, 6]", "4 microbatches"});
    expect_error<Error>([&] { pipeline.step({x}, {rows_of(0, 0, 2)}); }, {"rank 1", "a target"});
    expect_error<Error>([&] { pipeline.step({x}, {rows_of(0, 0, 4)}); }, {"rank 1", "have 1 rows, its inputs 2"});
    expect_error<Error>([&] { pipeline.evaluate({x}, {rows_of(0, 0, 4)}); }, {"rank 1", "have 1 rows, its inputs 2"});
    Pipeline without_loss(mesh, "pp", stage, PipelineOptions().microbatches(2));
    expect_error<Error>([&] { without_loss.step({x}); }, {"PipelineOptions().loss()"});
    EXPECT_EQ(without_loss.evaluate({x}).losses.size(), 0);
    expect_error<ValueError>([&] { Pipeline(mesh, "pp", stage, options_of(kSchedules[6], 2)); }, {"microbatches"});
    expect_error<ValueError>([&] { Pipeline(mesh, "pp", stage, PipelineOptions().microbatches(0)); }, {"microbatch"});
    constexpr int64_t too_many = (int64_t{1} << 32) + 1; // one, in 32 bits
    expect_error<ValueError>(
        [&] { Pipeline(mesh, "pp", stage, PipelineOptions().microbatches(too_many)); }, {"4294967297 microbatches"});
    expect_error<ValueError>([&] { Pipeline(mesh, "dp", stage, PipelineOptions()); }, {"no axis 'dp'"});
    expect_error<ValueError>(
        [&] {
          Pipeline(
              mesh, "pp", [](int64_t) { return PipelineStage({}, nullptr); }, PipelineOptions());
        },
        {"has no function"});
    pipeline.step({x}, {x});
  });
}

} // namespace shardwise::test
