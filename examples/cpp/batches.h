#pragma once

#include <torch/torch.h>

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <stdexcept>
#include <vector>

struct Batch {
  /// [sequences, context] bytes as int64, and for each the byte that follows it.
  torch::Tensor input;
  torch::Tensor target;
};

/// Pieces of a file. Which pieces depends on the seed, the step and the rank alone, so that any process can draw the
/// batch of any rank. examples/python/batches.py draws the same.
class Batches {
 public:
  Batches(const std::filesystem::path& file, uint64_t seed, int64_t sequences, int64_t context)
      : seed_(seed),
        sequences_(sequences),
        context_(context) {
    std::ifstream stream(file, std::ios::binary);
    if (!stream) throw std::runtime_error("gpt: cannot read the corpus " + file.string() + ".");
    text_.assign(std::istreambuf_iterator<char>(stream), {});
    if (text_.size() <= static_cast<size_t>(context)) {
      throw std::runtime_error(
          "gpt: the corpus " + file.string() + " has " + std::to_string(text_.size()) + " bytes; it needs more than " +
          std::to_string(context) + ", the length of a sequence.");
    }
  }

  Batch draw(int64_t step, int64_t rank, torch::Device device) const {
    auto rows = torch::empty({sequences_, context_ + 1}, torch::kInt64);
    auto* row = rows.data_ptr<int64_t>();
    for (int64_t i = 0; i < sequences_; ++i, row += context_ + 1) {
      const auto* start = text_.data() + offset(step, rank, i);
      std::copy(start, start + context_ + 1, row);
    }
    rows = rows.to(device);
    return {rows.narrow(1, 0, context_), rows.narrow(1, 1, context_)};
  }

 private:
  size_t offset(int64_t step, int64_t rank, int64_t sequence) const {
    uint64_t hash = mix(seed_);
    for (const auto part : {step, rank, sequence}) hash = mix(hash ^ static_cast<uint64_t>(part));
    return hash % (text_.size() - static_cast<size_t>(context_));
  }

  /// One round of the splitmix64 generator.
  static uint64_t mix(uint64_t x) {
    x += 0x9e3779b97f4a7c15;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
    x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
    return x ^ (x >> 31);
  }

  uint64_t seed_;
  int64_t sequences_;
  int64_t context_;
  std::vector<uint8_t> text_;
};
