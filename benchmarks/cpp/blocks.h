#pragma once

#include <c10/util/StringUtil.h>
#include <torch/torch.h>

#include <algorithm>
#include <iostream>
#include <sstream>
#include <string>
#include <vector>

// Models of many small parameters, and programs that measure such models of several sizes.

/// One operation a parameter.
struct BlockImpl : torch::nn::Module {
  explicit BlockImpl(int64_t parameters) {
    for (int64_t i = 0; i < parameters; ++i) {
      weights.push_back(register_parameter(c10::str("w", i), torch::ones({8, 4})));
    }
  }
  torch::Tensor forward(torch::Tensor x) {
    for (const auto& weight : weights) x = x * weight;
    return x;
  }
  std::vector<torch::Tensor> weights;
};
TORCH_MODULE(Block);

struct Size {
  int64_t blocks = 0;
  int64_t parameters = 0;
  int ranks = 0;

  explicit Size(const std::string& text) {
    char first = 0;
    char second = 0;
    std::istringstream in(text);
    in >> blocks >> first >> parameters >> second >> ranks;
    if (!in || first != 'x' || second != 'x' || blocks < 1 || parameters < 1 || ranks < 2) {
      throw std::invalid_argument("A size is blocks x parameters x ranks, as 8x9x2, not '" + text + "'.");
    }
  }
  std::string text() const {
    return c10::str(blocks, "x", parameters, "x", ranks);
  }
};

struct ModelImpl : torch::nn::Module {
  explicit ModelImpl(const Size& size) {
    for (int64_t i = 0; i < size.blocks; ++i) {
      blocks.push_back(register_module(c10::str("block", i), Block(size.parameters)));
    }
  }
  template <typename Call>
  torch::Tensor run(torch::Tensor x, const Call& call) {
    for (const auto& block : blocks) x = call(block, x);
    return x;
  }
  std::vector<Block> blocks;
};
TORCH_MODULE(Model);

/// The cases that are measured; all where there are none.
inline std::vector<std::string>& only() {
  static std::vector<std::string> names;
  return names;
}

inline bool wanted(const std::string& name) {
  return only().empty() || std::find(only().begin(), only().end(), name) != only().end();
}

inline std::vector<std::string> split(const std::string& text) {
  std::vector<std::string> result;
  std::istringstream parts(text);
  for (std::string part; std::getline(parts, part, ',');) result.push_back(part);
  return result;
}

/// What main() returns: `run` for each size of the arguments, on one thread; an error is printed.
template <typename Run>
int run_sizes(int count, char** arguments, const Run& run) {
  try {
    const std::vector<std::string> words(arguments + 1, arguments + count);
    const bool some = words.size() == 4 && words[2] == "--only";
    if (words.size() < 2 || words[0] != "--sizes" || (words.size() > 2 && !some)) {
      throw std::invalid_argument("The arguments are --sizes 8x9x2,32x9x2 and perhaps --only fully_shard,replicate.");
    }
    if (some) only() = split(words[3]);
    torch::set_num_threads(1);
    for (const auto& size : split(words[1])) run(Size(size));
  } catch (const std::exception& error) {
    std::cerr << error.what() << std::endl;
    return 1;
  }
  return 0;
}
