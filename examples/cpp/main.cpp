// Trains a small GPT on the ranks that torchrun started, each on its own batches, or in one process on all of them.
#include <shardwise/shardwise.h>

#include "batches.h"
#include "memory.h"
#include "model.h"
#include "options.h"
#include "progress.h"
#include "records.h"
#include "three_d.h"

#include <iostream>
#include <numeric>
#include <optional>

namespace {

/// Spreads the model over the ranks: a unit for each block, and one for the rest.
shardwise::Unit distribute(Gpt& model, const shardwise::Mesh& mesh, const std::string& mode) {
  if (mode == "fully_shard") {
    const auto options = shardwise::FullyShardOptions().mesh(mesh);
    for (const auto& block : *model->blocks) shardwise::fully_shard(block, options);
    return shardwise::fully_shard(model, options);
  }
  const auto options = shardwise::ReplicateOptions().mesh(mesh);
  for (const auto& block : *model->blocks) shardwise::replicate(block, options);
  return shardwise::replicate(model, options);
}

/// One step over the batches of the given ranks, with the mean of their gradients. Returns their mean loss.
double train_step(
    Gpt& model, torch::optim::AdamW& optimizer, const Batches& batches, int64_t step, const std::vector<int64_t>& ranks,
    torch::Device device) {
  const auto count = static_cast<double>(ranks.size());
  double sum = 0;
  optimizer.zero_grad();
  for (const auto rank : ranks) {
    const auto batch = batches.draw(step, rank, device);
    const auto loss = loss_of(model->forward(batch.input), batch.target);
    (loss / count).backward();
    sum += loss.item<double>();
  }
  optimizer.step();
  return sum / count;
}

torch::Tensor numbers(const Record& record) {
  return torch::tensor({record.loss, record.tokens_per_second, record.memory_mib()}, torch::kFloat64);
}

/// The numbers of every rank, a row each. Every rank must call it.
torch::Tensor gather(const Record& record, const shardwise::Mesh& mesh) {
  std::vector<at::Tensor> sent{numbers(record).to(mesh.device())};
  std::vector<std::vector<at::Tensor>> received(1);
  for (int64_t rank = 0; rank < mesh.size(); ++rank) received[0].push_back(torch::empty_like(sent[0]));
  mesh.group("world")->allgather(received, sent)->wait();
  return torch::stack(received[0]).cpu();
}

void show(Progress& progress, int64_t step, const torch::Tensor& rows) {
  const auto memory = rows.select(1, 2).contiguous();
  progress.show(
      step, rows.select(1, 0).mean().item<double>(), rows.select(1, 1).sum().item<double>(),
      {memory.data_ptr<double>(), memory.data_ptr<double>() + memory.numel()});
}

void write_facts(const Options& options, const GptOptions& shape, int64_t parameters, const shardwise::Mesh& mesh) {
  std::ofstream(options.out / "run.json")
      << "{\"ranks\": " << mesh.size() << ", \"parameters\": " << parameters << ", \"context\": " << shape.context
      << ", \"batch\": " << options.batch << ", \"device\": \"" << mesh.device().type() << "\", \"mode\": \""
      << options.mode << "\"}\n";
}

void run_three_d(const Options& options) {
  Memory::watch();
  const GptOptions shape;
  ThreeD training(options, shape);
  if (training.mesh().rank() == 0) write_facts(options, shape, training.parameters(), training.mesh());
  training.run();
}

void run(const Options& options) {
  const bool reference = options.reference_of > 0;
  std::optional<shardwise::Mesh> mesh;
  if (!reference) mesh = shardwise::Mesh::from_env();
  const auto device = mesh ? mesh->device() : torch::Device(torch::cuda::is_available() ? "cuda:0" : "cpu");
  const int64_t rank = mesh ? mesh->rank() : 0;

  Memory::watch();
  const GptOptions shape;
  Gpt model(shape);
  initialize(*model, options.seed);
  model->to(device);
  const auto parameters = number_of_parameters(*model);
  if (mesh) {
    const auto unit = distribute(model, *mesh, options.mode);
    if (rank == 0) {
      std::cout << unit.plan().table() << std::endl;
      write_facts(options, shape, parameters, *mesh);
    }
  }
  auto optimizer = make_optimizer(*model);

  std::vector<int64_t> ranks{rank};
  if (reference) {
    ranks.resize(static_cast<size_t>(options.reference_of));
    std::iota(ranks.begin(), ranks.end(), 0);
  }
  const Batches batches(options.corpus, options.seed, options.batch, shape.context);
  Records records(options.out / (reference ? "reference.jsonl" : "rank" + std::to_string(rank) + ".jsonl"));
  Progress progress(reference ? "one process" : "step", options.steps);
  const auto tokens = static_cast<double>(static_cast<int64_t>(ranks.size()) * options.batch * shape.context);
  for (int64_t step = 1; step <= options.steps; ++step) {
    Memory::begin_step(device);
    const auto begin = std::chrono::steady_clock::now();
    const auto loss = train_step(model, optimizer, batches, step, ranks, device);
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begin;
    const Record record{step, loss, tokens / seconds.count(), resident_mib(), device_mib(device)};
    records.write(record);
    if (!progress.due(step)) continue;
    const auto rows = mesh ? gather(record, *mesh) : numbers(record).unsqueeze(0);
    if (rank == 0) show(progress, step, rows);
  }
  if (mesh && rank == 0) Memory::after_step(*model, optimizer, device).write(options.out / "memory.json");
}

} // namespace

int main(int count, char** arguments) {
  try {
    const auto options = Options::parse(count, arguments);
    options.mode == "3d" && options.reference_of == 0 ? run_three_d(options) : run(options);
  } catch (const std::exception& error) {
    std::cerr << error.what() << std::endl;
    return 1;
  }
}
