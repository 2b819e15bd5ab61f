#pragma once

#include "batches.h"
#include "memory.h"
#include "model.h"
#include "options.h"
#include "progress.h"
#include "records.h"

#include <shardwise/shardwise.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <iomanip>
#include <iostream>
#include <string>
#include <vector>

// The same GPT in three dimensions: its layers in pipeline stages, each layer divided between ranks (tensor parallel),
// and all of that twice, on different batches, with sharded parameters.

/// Some blocks of the whole model, under their names there; the first stage has the embeddings, the last one the head.
struct StageImpl : torch::nn::Module {
  StageImpl(Gpt& whole, int64_t stage, int64_t stages) {
    const auto layers = static_cast<int64_t>(whole->blocks->size());
    if (stage == 0) {
      bytes = register_module("bytes", whole->bytes);
      positions = register_module("positions", whole->positions);
    }
    register_module("blocks", blocks);
    for (auto i = layers * stage / stages; i < layers * (stage + 1) / stages; ++i) {
      own.push_back(whole->blocks->ptr<BlockImpl>(static_cast<size_t>(i)));
      blocks->register_module(std::to_string(i), own.back().ptr());
    }
    if (stage + 1 == stages) {
      norm = register_module("norm", whole->norm);
      head = register_module("head", whole->head);
    }
  }

  torch::Tensor forward(torch::Tensor x) {
    if (bytes) x = bytes(x) + positions(torch::arange(x.size(1), x.options()));
    for (auto& block : own) x = block(x);
    return head ? head(norm(x)) : x;
  }

  /// How the ranks along the axis "tp" divide the layers.
  shardwise::SplitPlan plan(int64_t heads) const {
    shardwise::SplitPlan plan{
        {"blocks.*.qkv", shardwise::colwise().segments(3).heads(heads)},
        {"blocks.*.projection", shardwise::rowwise().heads(heads)},
        {"blocks.*.expand", shardwise::colwise()},
        {"blocks.*.contract", shardwise::rowwise()}};
    if (bytes) plan.emplace_back("bytes", shardwise::vocabulary());
    if (head) plan.emplace_back("head", shardwise::colwise().gather_output(true));
    return plan;
  }

  torch::nn::Embedding bytes = nullptr;
  torch::nn::Embedding positions = nullptr;
  torch::nn::ModuleDict blocks;
  std::vector<Block> own;
  torch::nn::LayerNorm norm = nullptr;
  torch::nn::Linear head = nullptr;
};
TORCH_MODULE(Stage);

class ThreeD {
 public:
  ThreeD(const Options& options, const GptOptions& shape)
      : options_(options),
        shape_(shape),
        mesh_({{"pp", 2}, {"dp", 2}, {"tp", 2}}),
        pipeline_(
            mesh_, "pp", [this](int64_t number) { return make(number); }, pipeline_options()),
        optimizer_(make_optimizer(*stage_)) {}

  const shardwise::Mesh& mesh() const {
    return mesh_;
  }
  int64_t parameters() const {
    return parameters_;
  }

  void run() {
    if (mesh_.rank() == 0) std::cout << plans_ << "\nThe stages, by rank along pp:\n" << pipeline_.table() << std::endl;
    const Batches batches(options_.corpus, options_.seed, options_.batch, shape_.context);
    Records records(options_.out / ("rank" + std::to_string(mesh_.rank()) + ".jsonl"));
    Progress progress("step", options_.steps);
    const auto device = mesh_.device();
    const auto replicas = static_cast<double>(mesh_.size("dp"));
    const auto tokens = replicas * static_cast<double>(options_.batch * shape_.context);
    for (int64_t step = 1; step <= options_.steps; ++step) {
      Memory::begin_step(device);
      const auto begin = std::chrono::steady_clock::now();
      const auto batch = batches.draw(step, mesh_.coordinate("dp"), device);
      optimizer_.zero_grad();
      const auto result = pipeline_.step({batch.input}, {batch.target});
      optimizer_.step();
      const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begin;
      seconds_ += result.seconds;
      busy_seconds_ += result.busy_seconds;
      const auto loss = mean_loss(result.losses);
      const auto rate = tokens / seconds.count();
      records.write({step, loss, rate / static_cast<double>(mesh_.size()), resident_mib(), device_mib(device)});
      if (progress.due(step) && mesh_.rank() == 0) progress.show(step, loss, rate, {resident_mib()});
    }
    tell(Memory::after_step(*stage_, optimizer_, device));
  }

 private:
  shardwise::PipelineOptions pipeline_options() const {
    return shardwise::PipelineOptions()
        .microbatches(std::min<int64_t>(4, options_.batch))
        .loss([](const auto& outputs, const auto& targets) { return loss_of(outputs[0], targets[0]); });
  }

  shardwise::PipelineStage make(int64_t number) {
    Gpt whole(shape_);
    initialize(*whole, options_.seed);
    parameters_ = number_of_parameters(*whole);
    stage_ = Stage(whole, number, mesh_.size("pp"));
    plans_ = shardwise::parallelize(stage_, mesh_, "tp", stage_->plan(shape_.heads)).table();
    const auto options = shardwise::FullyShardOptions().mesh(mesh_.along({"dp"}));
    for (auto& block : stage_->own) {
      block->heads /= mesh_.size("tp");
      shardwise::fully_shard(block, options);
    }
    plans_ += "\n" + shardwise::fully_shard(stage_, options).plan().table();
    return stage_;
  }

  /// Of all microbatches and replicas, on every rank. Only ranks with the last stage have losses.
  double mean_loss(const std::vector<torch::Tensor>& losses) const {
    const auto ranks = static_cast<double>(mesh_.size("dp") * mesh_.size("tp"));
    const auto mine = losses.empty() ? torch::zeros({}, mesh_.device()) : torch::stack(losses).mean() / ranks;
    return summed(mine.to(torch::kFloat64).view({1})).item<double>();
  }

  torch::Tensor summed(const torch::Tensor& numbers) const {
    std::vector<at::Tensor> sums{numbers};
    for (const auto& axis : mesh_.axes()) mesh_.group(axis.name)->allreduce(sums)->wait();
    return sums[0].cpu();
  }

  /// What each rank has, as a table that rank 0 prints.
  void tell(const Memory& memory) const {
    const auto rank = mesh_.rank();
    auto rows = torch::zeros({mesh_.size(), 6}, torch::kFloat64);
    const auto bubble = 1 - busy_seconds_ / seconds_;
    const std::vector<double> mine{bubble,           memory.parameters, memory.gradients,
                                   memory.optimizer, memory.all,        memory.peak};
    rows[rank] = torch::tensor(mine, torch::kFloat64);
    rows = summed(rows.to(mesh_.device()));
    if (rank != 0) return;
    std::cout << "\nWhat each rank has: how much of a step its stage waits, and MiB of tensors. With stages alike and a"
                 "\ncore for each rank it would wait for "
              << std::lround(100 * pipeline_.bubble()[0]) << " %.\n"
              << std::setw(22) << "pp dp tp" << std::setw(10) << "waits";
    for (const auto* head : {"parameters", "gradients", "optimizer", "all", "peak"}) std::cout << std::setw(12) << head;
    std::cout << std::fixed << "\n";
    const auto values = rows.accessor<double, 2>();
    for (int64_t each = 0; each < mesh_.size(); ++each) {
      std::cout << "rank " << each << std::setw(10) << each / 4 << std::setw(3) << each / 2 % 2 << std::setw(3)
                << each % 2 << std::setw(8) << std::setprecision(0) << 100 * values[each][0] << " %"
                << std::setprecision(1);
      for (int64_t column = 1; column < 6; ++column) std::cout << std::setw(12) << values[each][column];
      std::cout << "\n";
    }
    std::cout << std::flush;
  }

  const Options& options_;
  GptOptions shape_;
  shardwise::Mesh mesh_;
  Stage stage_ = nullptr;
  int64_t parameters_ = 0;
  std::string plans_;
  shardwise::Pipeline pipeline_;
  torch::optim::AdamW optimizer_;
  double seconds_ = 0;
  double busy_seconds_ = 0;
};
