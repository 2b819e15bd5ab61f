#pragma once

#include <torch/torch.h>

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <memory>
#include <optional>
#include <stdexcept>
#include <utility>
#include <vector>

/// Pieces of a file, as torch::data takes them: `context` bytes and, for each, the byte that follows it. The last tenth
/// of the file is for evaluation.
class Text : public torch::data::datasets::Dataset<Text> {
 public:
  Text(const std::filesystem::path& file, int64_t context, bool for_evaluation) : context_(context) {
    std::ifstream stream(file, std::ios::binary);
    if (!stream) throw std::runtime_error("pretrain: cannot read " + file.string() + ".");
    const std::vector<uint8_t> all(std::istreambuf_iterator<char>(stream), {});
    const auto cut = all.begin() + static_cast<int64_t>(all.size()) / 10 * 9;
    bytes_ = std::make_shared<const std::vector<uint8_t>>(
        for_evaluation ? cut : all.begin(), for_evaluation ? all.end() : cut);
    if (*size() == 0) throw std::runtime_error("pretrain: " + file.string() + " is too short.");
  }

  torch::data::Example<> get(size_t index) override {
    const auto* begin = bytes_->data() + static_cast<int64_t>(index) * context_;
    const auto piece = torch::empty({context_ + 1}, torch::kInt64);
    std::copy(begin, begin + context_ + 1, piece.data_ptr<int64_t>());
    return {piece.narrow(0, 0, context_), piece.narrow(0, 1, context_)};
  }
  torch::optional<size_t> size() const override {
    return bytes_->empty() ? 0 : (bytes_->size() - 1) / static_cast<size_t>(context_);
  }

 private:
  int64_t context_;
  std::shared_ptr<const std::vector<uint8_t>> bytes_;
};

/// Gives each rank its part of every batch. Which examples a batch of all ranks has depends on the epoch alone, so a
/// run that goes on with more ranks sees the same.
class PartsOfBatches : public torch::data::samplers::DistributedSampler<> {
 public:
  PartsOfBatches(size_t examples, size_t batch, size_t ranks, size_t rank)
      : DistributedSampler(examples, ranks, rank, /*allow_duplicates=*/false),
        batch_(batch) {
    if (batch % ranks != 0) throw std::invalid_argument("pretrain: the batch must be a multiple of the ranks.");
    reset(std::nullopt);
  }

  size_t batches() const {
    return size_ / batch_;
  }
  /// A loader that gets this sampler gives the batches of this epoch, but for the first ones.
  PartsOfBatches& from(size_t epoch, size_t first) {
    set_epoch(epoch);
    first_ = first;
    return *this;
  }

  void reset(torch::optional<size_t> = std::nullopt) override {
    next_ = first_;
    at::Generator generator = at::detail::createCPUGenerator(epoch());
    order_ = torch::randperm(static_cast<int64_t>(size_), generator, torch::kInt64);
  }
  torch::optional<std::vector<size_t>> next(size_t count) override {
    if (next_ >= batches()) return std::nullopt;
    const auto first = next_++ * batch_ + rank_ * count;
    std::vector<size_t> indices;
    for (size_t i = first; i < first + count; ++i) indices.push_back(order_[static_cast<int64_t>(i)].item<int64_t>());
    return indices;
  }
  void save(torch::serialize::OutputArchive&) const override {}
  void load(torch::serialize::InputArchive&) override {}

 private:
  size_t batch_;
  size_t first_ = 0;
  size_t next_ = 0;
  torch::Tensor order_;
};
