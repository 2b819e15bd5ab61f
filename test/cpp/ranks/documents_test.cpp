// The C++ code that the pages of docs/ show. test/python/unit/test_docs.py looks whether all of it is here.
#include "support/folder.h"
#include "support/processes.h"

#include <shardwise/shardwise.h>

#include <gtest/gtest.h>

#include <cstdio>
#include <cstdlib>
#include <filesystem>

namespace shardwise::test::documents {
namespace {

struct Model : torch::nn::Module {
  Model() {
    for (int i = 0; i < 2; ++i) blocks->push_back(torch::nn::Linear(4, 4));
  }
  torch::Tensor forward(torch::Tensor x) {
    for (const auto& block : *blocks) x = block->as<torch::nn::Linear>()->forward(x);
    return x;
  }
  torch::nn::ModuleList blocks = register_module("blocks", torch::nn::ModuleList());
};

template <typename Optimizer>
void step(Model& model, Optimizer& optimizer) {
  model.forward(torch::ones({2, 4})).sum().backward();
  optimizer.step();
}

void from_ddp() {
  auto model = std::make_shared<Model>();
  shardwise::replicate(model);
  torch::optim::AdamW optimizer(model->parameters(), 1e-3);
  step(*model, optimizer);
}

void line_by_line() {
  auto model = std::make_shared<Model>();
  for (auto& block : *model->blocks) shardwise::fully_shard(*block);
  shardwise::fully_shard(model);
  torch::optim::AdamW optimizer(model->parameters(), 1e-3);
  step(*model, optimizer);
}

void tensors() {
  auto points = torch::randn({8, 3}).requires_grad_();
  shardwise::replicate(std::vector{points});
  torch::optim::Adam optimizer({points}, torch::optim::AdamOptions(1e-3));
  const auto step = [&] {
    points.pow(2).sum().backward();
    optimizer.step();
  };
  step();
  auto grown = torch::cat({points.detach(), points.detach().narrow(0, 0, 2)}).requires_grad_();
  shardwise::replicate(std::vector{grown});
  optimizer.param_groups()[0].params()[0] = grown;
  optimizer.state().erase(points.unsafeGetTensorImpl());
  points = grown;
  step();
  EXPECT_EQ(optimizer.state().size(), 1);
}

void usual_step() {
  auto model = std::make_shared<Model>();
  auto unit = shardwise::fully_shard(model);
  torch::optim::AdamW optimizer(model->parameters(), 1e-3);

  for (int part = 0; part < 4; ++part) {
    unit.set_requires_gradient_sync(part == 3);
    (model->forward(torch::randn({4, 4})).pow(2).mean() / 4).backward();
  }
  shardwise::clip_grad_norm_(model, 1.0);
  optimizer.step();
  optimizer.zero_grad();

  const torch::NoGradGuard no_grad;
  model->forward(torch::randn({4, 4}));
}

void optimizers() {
  auto model = std::make_shared<Model>();
  shardwise::fully_shard(model);
  shardwise::AdamW optimizer(model->parameters(), torch::optim::AdamWOptions(1e-3));
  shardwise::GradScaler scaler;
  const auto loss = model->forward(torch::ones({2, 4})).pow(2).mean();
  scaler.scale(loss).backward();
  scaler.unscale_(optimizer); // only to clip, or to look at gradients
  shardwise::clip_grad_norm_(model, 1.0);
  scaler.step(optimizer);
  scaler.update();
  const auto moments = shardwise::full_optimizer_state_dict(model, optimizer);
  shardwise::load_full_optimizer_state_dict(model, optimizer, moments);
  ASSERT_EQ(moments.size(), 4 * (3 + 5));
}

void choosing() {
  auto model = std::make_shared<Model>();
  const shardwise::Mesh mesh({{"copies", 1}, {"shards", 2}});
  shardwise::fully_shard(model, shardwise::FullyShardOptions().mesh(mesh));
}

struct SplitLayer : torch::nn::Module {
  torch::Tensor forward(const torch::Tensor& x) {
    return down(torch::relu(up(x)));
  }
  torch::nn::Linear up = register_module("up", torch::nn::Linear(4, 8));
  torch::nn::Linear down = register_module("down", torch::nn::Linear(8, 4));
};

struct SplitExample : torch::nn::Module {
  SplitExample() {
    layers->push_back(std::make_shared<SplitLayer>());
  }
  torch::Tensor forward(const torch::Tensor& tokens) {
    return layers[0]->as<SplitLayer>()->forward(table(tokens));
  }
  torch::nn::Embedding table = register_module("table", torch::nn::Embedding(10, 4));
  torch::nn::ModuleList layers = register_module("layers", torch::nn::ModuleList());
};

void tensor_parallelism() {
  auto model = std::make_shared<SplitExample>();
  const shardwise::Mesh mesh({{"dp", 1}, {"tp", 2}});
  shardwise::parallelize(
      model, mesh, "tp",
      {{"table", shardwise::vocabulary()},
       {"layers.*.up", shardwise::colwise()},
       {"layers.*.down", shardwise::rowwise()}});
  shardwise::fully_shard(model, shardwise::FullyShardOptions().mesh(mesh.along({"dp"})));
  torch::optim::AdamW optimizer(model->parameters(), 1e-3);
  model->forward(torch::arange(6)).sum().backward();
  optimizer.step();
  ASSERT_EQ(shardwise::full_state_dict(model)["table.weight"].size(0), 10);
}

void pipelines() {
  const auto inputs = torch::randn({8, 4});
  const auto targets = torch::randn({8, 4});
  const shardwise::Mesh mesh({{"pp", 2}, {"dp", 1}});
  const auto options =
      shardwise::PipelineOptions()
          .schedule(shardwise::PipelineSchedule::one_forward_one_backward)
          .microbatches(4)
          .loss([](const auto& outputs, const auto& targets) { return torch::mse_loss(outputs[0], targets[0]); });
  std::vector<torch::nn::Linear> own; // the stages of this rank
  shardwise::Pipeline pipeline(
      mesh, "pp",
      [&](int64_t /*stage*/) {
        own.emplace_back(4, 4);
        shardwise::fully_shard(own.back(), shardwise::FullyShardOptions().mesh(mesh.along({"dp"})));
        return shardwise::PipelineStage(own.back());
      },
      options);
  torch::optim::AdamW optimizer(own[0]->parameters(), 1e-3);
  const auto result = pipeline.step({inputs}, {targets}); // losses of the microbatches, where the last stage is
  optimizer.step();
  ASSERT_EQ(result.losses.size(), mesh.coordinate("pp") == 1 ? 4 : 0);
}

void whole_models(const std::string& file) {
  auto model = std::make_shared<Model>();
  const auto mesh = Mesh::current();
  shardwise::fully_shard(model, shardwise::FullyShardOptions().mesh(mesh));
  const auto expected = shardwise::full_state_dict(model);
  const auto whole = shardwise::full_state_dict(model, shardwise::FullStateDictOptions().rank0_only(true));
  if (mesh.rank() == 0) {
    torch::serialize::OutputArchive archive;
    for (const auto& entry : whole) archive.write(entry.key(), entry.value());
    archive.save_to(file);
  }
  {
    const torch::NoGradGuard no_grad;
    for (auto& shard : model->parameters()) shard.zero_();
  }
  shardwise::StateDict read;
  if (mesh.rank() == 0) {
    torch::serialize::InputArchive archive;
    archive.load_from(file);
    for (const auto& name : archive.keys()) {
      torch::Tensor tensor;
      archive.read(name, tensor);
      read.insert(name, tensor);
    }
  }
  shardwise::load_full_state_dict(model, read);
  const auto now = shardwise::full_state_dict(model);
  ASSERT_EQ(now.size(), 4);
  for (const auto& entry : now) EXPECT_TRUE(entry.value().equal(expected[entry.key()])) << entry.key();
}

void own_archives(const std::string& folder) {
  auto model = std::make_shared<Model>();
  const auto mesh = Mesh::current();
  shardwise::fully_shard(model, shardwise::FullyShardOptions().mesh(mesh));
  torch::optim::AdamW optimizer(model->parameters(), 1e-3);
  step(*model, optimizer);
  torch::save(model, folder + "/model-" + std::to_string(mesh.rank()) + ".pt");
  torch::save(optimizer, folder + "/optimizer-" + std::to_string(mesh.rank()) + ".pt");
  const auto own = std::to_string(mesh.rank()) + ".pt";
  torch::load(model, folder + "/model-" + own);
  torch::load(optimizer, folder + "/optimizer-" + own);
  step(*model, optimizer);
}

struct ResumableStepLR : torch::optim::StepLR {
  using StepLR::StepLR;
  int64_t steps() const {
    return step_count_;
  }
  void resume(int64_t steps) {
    step_count_ = static_cast<unsigned>(steps);
  }
};

/// In a folder that all ranks see: they are processes, and have only the port in common.
void sharded() {
  auto model = std::make_shared<Model>();
  const auto mesh = Mesh::current();
  shardwise::fully_shard(model, shardwise::FullyShardOptions().mesh(mesh));
  torch::optim::AdamW optimizer(model->parameters(), 1e-3);
  step(*model, optimizer);
  const auto expected = shardwise::full_state_dict(model);
  const auto root = c10::str(P_tmpdir, "/shardwise-documents-", std::getenv("MASTER_PORT"));
  const auto file = root + "/model.safetensors";
  {
    const auto folder = shardwise::step_folder(root, 100);
    shardwise::save(folder, model, optimizer, shardwise::SaveOptions().values({{"step", int64_t{100}}}));
    const auto loaded = shardwise::load(folder, model, optimizer);
    const auto step = std::get<int64_t>(loaded.values.at("step"));
    shardwise::AsyncSaver saver; // saves while training goes on
    saver.save(shardwise::step_folder(root, 200), model, optimizer);
    saver.wait(); // at the end
    shardwise::export_safetensors(file, model);
    EXPECT_EQ(step, 100);
  }
  {
    const std::string folder = shardwise::step_folder(root, 200);
    ResumableStepLR scheduler(optimizer, 1, 0.5);
    for (int i = 0; i < 2; ++i) scheduler.step();
    shardwise::save(folder, model, optimizer, shardwise::SaveOptions().values({{"scheduler", scheduler.steps()}}));
    scheduler.step();
    ResumableStepLR again(optimizer, 1, 0.5);
    const auto loaded = shardwise::load(folder, model, optimizer); // the learning rates too
    again.resume(std::get<int64_t>(loaded.values.at("scheduler")));
    again.step();
    EXPECT_EQ(optimizer.param_groups().front().options().get_lr(), 0.25e-3);
  }
  step(*model, optimizer);
  shardwise::load(shardwise::newest_step(root)->folder, model, optimizer);
  const auto now = shardwise::full_state_dict(model);
  for (const auto& entry : now) EXPECT_TRUE(entry.value().equal(expected[entry.key()])) << entry.key();
  mesh.barrier();
  if (mesh.rank() == 0) std::filesystem::remove_all(root);
}

void whole_parameters() {
  struct Model : torch::nn::Module {
    torch::nn::Linear head = register_module("head", torch::nn::Linear(6, 4));
  };
  const auto model = std::make_shared<Model>();
  shardwise::fully_shard(*model);
  shardwise::with_whole_parameters(model, [&] { torch::nn::init::xavier_uniform_(model->head->weight); });
  EXPECT_EQ(model->parameters()[0].size(0), 2);
}

} // namespace

TEST(Documents, CodeOfThePages) {
  ProcessOptions options;
  options.environment = {{"CUDA_VISIBLE_DEVICES", ""}};
  run_processes(
      2,
      [](Rank& rank) {
        from_ddp();
        line_by_line();
        tensors();
        usual_step();
        optimizers();
        choosing();
        tensor_parallelism();
        pipelines();
        rank.step("files");
        const TemporaryFolder folder;
        whole_models(folder / "model.pt");
        own_archives(folder.path());
        sharded();
        whole_parameters();
      },
      options);
}

} // namespace shardwise::test::documents
