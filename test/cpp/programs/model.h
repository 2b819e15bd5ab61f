#pragma once

#include "programs/random.h"

#include <torch/torch.h>

#include <memory>
#include <optional>
#include <set>
#include <stdexcept>
#include <string>
#include <vector>

namespace shardwise::test {

/// A tree of modules: what a node computes itself, then the nodes that it calls, some of them twice.
struct NodeSpec {
  enum class Kind { nothing, linear, norm, block };

  int id = 0;
  Kind kind = Kind::nothing;
  bool bias = true;
  /// A layer that single ranks may leave out.
  bool has_maybe = false;
  /// Children are in a ModuleList of their own, or each registered alone.
  bool in_list = false;
  std::vector<NodeSpec> children;
  /// The order in which children are called.
  std::vector<int> calls;

  /// It or a node below it has such a layer.
  bool has_maybes() const;
};

struct ModelSpec {
  int64_t width = 4;
  NodeSpec root;
  static ModelSpec random(Random& random);
  std::string text() const;
};

/// What a program throws on purpose.
struct Thrown : std::runtime_error {
  Thrown() : std::runtime_error("thrown on purpose") {}
};

/// One forward of a rank: its choices follow from a seed. All ranks run the same nodes in the same order; how often a
/// node repeats what it computes itself, and whether it uses its layer that may be left out, differs.
struct Walk {
  uint64_t seed = 0;
  int rank = 0;
  /// Nodes that throw in forward, or in backward when the gradient of their output comes.
  std::optional<int> throws_forward = std::nullopt;
  std::optional<int> throws_backward = std::nullopt;
  /// The nodes that ran.
  std::set<int> ran = {};

  bool skips(int node) const {
    return mixed({seed, 1, static_cast<uint64_t>(node)}, 6) == 0;
  }
  int repeats(int node) const {
    return 1 + mixed({seed, 2, static_cast<uint64_t>(node), static_cast<uint64_t>(rank)}, 5) / 3;
  }
  bool uses_maybe(int node) const {
    return mixed({seed, 3, static_cast<uint64_t>(node), static_cast<uint64_t>(rank)}, 2) == 0;
  }
};

struct NodeImpl : torch::nn::Module {
  NodeImpl(const NodeSpec& spec, int64_t width);
  torch::Tensor forward(const torch::Tensor& input, Walk& walk);

  NodeSpec spec;
  /// Used by every rank in each call.
  torch::Tensor scale;
  torch::nn::Linear linear = nullptr, down = nullptr, maybe = nullptr;
  torch::nn::LayerNorm norm = nullptr;
  torch::nn::ModuleList list = nullptr;
  std::vector<std::shared_ptr<NodeImpl>> children;

 private:
  torch::Tensor own(const torch::Tensor& x);
};

/// The same values wherever it is made.
std::shared_ptr<NodeImpl> make_model(const ModelSpec& spec);

} // namespace shardwise::test
