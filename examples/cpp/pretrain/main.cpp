// Trains a small GPT as a real run does: data from a file, a schedule, clipping, bfloat16, evaluation, a log, and
// checkpoints from which it goes on by itself, on any number of ranks.
//
//   torchrun --no-python --nproc-per-node 2 --max-restarts 3 pretrain --text FILE --out FOLDER
#include "../model.h"
#include "text.h"

#include <shardwise/shardwise.h>

#include <cmath>
#include <cstdio>
#include <iostream>
#include <map>
#include <numbers>

namespace {

/// The arguments, each --name VALUE.
struct Options {
  std::string text;
  std::string out;
  int64_t steps = 100;
  /// Sequences of all ranks in a step.
  int64_t batch = 8;
  double lr = 1e-3;
  /// Steps between checkpoints, and between evaluations.
  int64_t every = 20;
  bool bfloat16 = true;

  Options(int count, char** arguments) {
    std::map<std::string, std::string> given;
    for (int i = 1; i + 1 < count; i += 2) given[arguments[i]] = arguments[i + 1];
    const auto take = [&](const char* name, const std::string& otherwise) {
      const auto entry = given.extract(name);
      return entry ? entry.mapped() : otherwise;
    };
    text = take("--text", "");
    out = take("--out", "");
    steps = std::stoll(take("--steps", std::to_string(steps)));
    batch = std::stoll(take("--batch", std::to_string(batch)));
    every = std::stoll(take("--every", std::to_string(every)));
    lr = std::stod(take("--lr", std::to_string(lr)));
    bfloat16 = take("--bfloat16", "yes") == "yes";
    if (text.empty() || out.empty() || !given.empty() || count % 2 == 0) {
      throw std::invalid_argument(
          "pretrain: give --text FILE --out FOLDER, and if you like --steps --batch --every --lr --bfloat16 yes|no.");
    }
  }
};

/// Rises for a tenth of the steps, then falls to a tenth, as a half cosine.
double learning_rate(const Options& options, int64_t step) {
  const auto warm = std::max<int64_t>(1, options.steps / 10);
  if (step < warm) return options.lr * static_cast<double>(step + 1) / static_cast<double>(warm);
  const auto done = static_cast<double>(step - warm) / static_cast<double>(std::max<int64_t>(1, options.steps - warm));
  return options.lr * (0.1 + 0.45 * (1 + std::cos(std::numbers::pi * done)));
}

void set_learning_rate(torch::optim::Optimizer& optimizer, double lr) {
  for (auto& group : optimizer.param_groups()) group.options().set_lr(lr);
}

void shard(Gpt& model, const shardwise::Mesh& mesh, bool bfloat16) {
  auto options = shardwise::FullyShardOptions().mesh(mesh);
  if (bfloat16) {
    options.mixed_precision(shardwise::MixedPrecision().param_dtype(torch::kBFloat16).reduce_dtype(torch::kFloat32));
  }
  for (const auto& block : *model->blocks) shardwise::fully_shard(block, options);
  shardwise::fully_shard(model, options);
}

torch::Tensor loss_of(Gpt& model, const torch::data::Example<>& batch, torch::Device device) {
  const auto scores = model->forward(batch.data.to(device));
  return torch::cross_entropy_loss(scores.flatten(0, 1).to(torch::kFloat32), batch.target.to(device).flatten());
}

double evaluate(Gpt& model, Text& text, const shardwise::Mesh& mesh) {
  const torch::NoGradGuard no_grad;
  model->eval();
  // As many on each rank; all ranks run all units.
  constexpr int64_t kExamples = 8;
  double sum = 0;
  for (auto i = mesh.rank(); i < kExamples; i += mesh.size()) {
    auto example = text.get(static_cast<size_t>(i) % *text.size());
    sum += loss_of(model, {example.data.unsqueeze(0), example.target.unsqueeze(0)}, mesh.device()).item<double>();
  }
  model->train();
  return mesh.mean(sum) * static_cast<double>(mesh.size()) / kExamples;
}

void run(const Options& options) {
  const auto mesh = shardwise::Mesh::from_env();
  const GptOptions shape{.context = 64, .width = 64, .heads = 4, .layers = 2};
  Gpt model(shape);
  initialize(*model, 1);
  shard(model, mesh, options.bfloat16);
  shardwise::AdamW optimizer(
      model->parameters(), torch::optim::AdamWOptions(options.lr).betas({0.9, 0.95}).weight_decay(0.1));

  int64_t step = 0;
  const auto checkpoints = options.out + "/checkpoints";
  if (const auto newest = shardwise::newest_step(checkpoints)) {
    const auto loaded = shardwise::load(newest->folder, model, optimizer);
    step = std::get<int64_t>(loaded.values.at("step"));
    if (mesh.rank() == 0) std::printf("goes on after step %ld on %ld ranks\n", long(step), long(mesh.size()));
  }

  Text held_out(options.text, shape.context, /*for_evaluation=*/true);
  auto text = Text(options.text, shape.context, /*for_evaluation=*/false);
  PartsOfBatches sampler(
      *text.size(), static_cast<size_t>(options.batch), static_cast<size_t>(mesh.size()),
      static_cast<size_t>(mesh.rank()));
  const auto batches = static_cast<int64_t>(sampler.batches());
  if (batches == 0) throw std::invalid_argument("pretrain: the text has fewer examples than a batch.");
  shardwise::AsyncSaver saver;
  std::ofstream log;
  if (mesh.rank() == 0) log.open(options.out + "/log.jsonl", std::ios::app);

  while (step < options.steps) {
    sampler.from(static_cast<size_t>(step / batches), static_cast<size_t>(step % batches));
    const auto loader = torch::data::make_data_loader(
        text.map(torch::data::transforms::Stack<>()), sampler,
        torch::data::DataLoaderOptions(static_cast<size_t>(options.batch / mesh.size())).workers(1));
    for (const auto& batch : *loader) {
      if (step == options.steps) break;
      set_learning_rate(optimizer, learning_rate(options, step));
      optimizer.zero_grad();
      const auto loss = loss_of(model, batch, mesh.device());
      loss.backward();
      const auto norm = shardwise::clip_grad_norm_(model, 1.0);
      optimizer.step();
      ++step;
      const auto mean = mesh.mean(loss.item<double>());
      if (mesh.rank() == 0) {
        log << "{\"step\": " << step << ", \"loss\": " << mean << ", \"norm\": " << norm.item<double>() << "}"
            << std::endl;
      }
      if (step % options.every != 0 && step != options.steps) continue;
      const auto held_out_loss = evaluate(model, held_out, mesh);
      saver.save(
          shardwise::step_folder(checkpoints, step), model, optimizer,
          shardwise::SaveOptions().values({{"step", step}}));
      if (mesh.rank() != 0) continue;
      shardwise::keep_newest_steps(checkpoints, 2);
      std::printf("step %ld  loss %.3f  held out %.3f\n", long(step), mean, held_out_loss);
    }
  }
  saver.wait();
}

} // namespace

int main(int count, char** arguments) {
  try {
    run(Options(count, arguments));
  } catch (const std::exception& error) {
    std::cerr << error.what() << std::endl;
    return 1;
  }
}
