#pragma once

#include "base/torch_versions.h"

#include <shardwise/detail/export.h>

#include <ATen/core/Tensor.h>

#include <utility>
#include <vector>

namespace shardwise::pipeline {

/// A backward in two halves: the first computes the gradients of inputs, which may travel on at once, the second those
/// of everything else. Each operation computes its share of each half once: the second half begins at the operations
/// where gradients branch off, with the gradients that arrived there in the first one. Hooks run once, too.
class SHARDWISE_API BackwardHalves {
 public:
  using Tensors = std::vector<at::Tensor>;

  /// For the gradients of these outputs. `repeats`: the second half runs through the whole graph once more, for
  /// units that gather their parameters anew.
  BackwardHalves(Tensors outputs, Tensors gradients, bool repeats)
      : outputs_(std::move(outputs)),
        gradients_(std::move(gradients)),
        repeats_(repeats) {}

  /// The gradients of these leaves; undefined for leaves that the outputs do not depend on.
  Tensors input_gradients(const Tensors& inputs);
  /// Accumulates the gradients of all other leaves, or of all leaves if the first half was left out.
  void accumulate_parameter_gradients();

 private:
  using Node = base::NodePointer<torch::autograd::Node>;
  /// An operation that leads to inputs and elsewhere, and what arrived there. Edges to inputs are not valid.
  struct Fork {
    Node node;
    Tensors arrived;
    torch::autograd::edge_list elsewhere;
  };
  struct Paths;
  class CaptureAtForks;
  class RerunFork;

  /// The start of a whole backward, until the first half has left forks to continue from.
  Tensors outputs_;
  Tensors gradients_;
  bool repeats_;
  std::vector<Fork> forks_;
  /// Where the second half begins beside the forks.
  torch::autograd::edge_list others_;
  Tensors gradients_of_others_;
};

} // namespace shardwise::pipeline
