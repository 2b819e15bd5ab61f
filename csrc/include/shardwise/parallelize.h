#pragma once

#include <shardwise/counters.h>
#include <shardwise/detail/holder.h>
#include <shardwise/mesh.h>

#include <torch/arg.h>

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace shardwise {

/// How the ranks along an axis divide a layer, and in which form its inputs come and its outputs leave. colwise(),
/// rowwise(), vocabulary() and sequence() make it.
struct SHARDWISE_API Split {
  /// Each value is described at the function of its name.
  enum class Kind : uint8_t { colwise, rowwise, vocabulary, sequence };

  /// The functions colwise(), rowwise(), vocabulary() and sequence() call it.
  explicit Split(Kind kind) : kind(kind) {}

  /// How the parameters are divided. The options below refine that.
  Kind kind;
  /// Of colwise(): every rank gets all outputs. If not, each rank has those of its piece, for a rowwise() layer that
  /// follows.
  TORCH_ARG(bool, gather_output) = false;
  /// Of rowwise(): every rank has the whole input, and takes its piece of it. If not, the input is what colwise() left.
  TORCH_ARG(bool, split_input) = false;
  /// The weight is made of this many layers of equal size, one after the other, such as queries, keys and values. Each
  /// is divided by itself.
  TORCH_ARG(int64_t, segments) = 1;
  /// The outputs of colwise() (the inputs of rowwise()) belong to this many heads. Each rank has whole heads, so the
  /// axis must divide their number.
  TORCH_ARG(std::optional<int64_t>, heads) = std::nullopt;
  /// Sequence parallelism: between the layers each rank has a part of the activations along this dimension, all parts
  /// of equal size. colwise() gathers its input along it; rowwise() and vocabulary() leave a part of their sum.
  TORCH_ARG(std::optional<int64_t>, sequence_dim) = std::nullopt;
  /// The weight is [inputs, outputs], as for torch::matmul(input, weight), and not [outputs, inputs], as Linear's is.
  TORCH_ARG(bool, transposed) = false;
};

/// Each rank has some outputs: rows of a Linear's weight and elements of its bias, or the features of an Embedding.
inline Split colwise() {
  return Split(Split::Kind::colwise);
}
/// Each rank has some inputs: columns of a Linear's weight. The results are added up over the ranks; the bias stays
/// whole, and is added once.
inline Split rowwise() {
  return Split(Split::Kind::rowwise);
}
/// Each rank has some entries of an Embedding's table. The same weight may serve a Linear, by colwise().
inline Split vocabulary() {
  return Split(Split::Kind::vocabulary);
}
/// The parameters stay whole, but each rank uses them on its part of the activations only, as a norm does between
/// layers with a sequence_dim: their gradients are added up over the ranks.
inline Split sequence() {
  return Split(Split::Kind::sequence);
}

/// Names of modules or parameters, and how to divide them. `*` stands for any text without a dot. The first pattern
/// that fits counts.
using SplitPlan = std::vector<std::pair<std::string, Split>>;

/// The options of parallelize(). Everything has a default.
struct SHARDWISE_API ParallelizeOptions {
  /// First give every rank along the axis the parameters and buffers of the first one.
  TORCH_ARG(bool, broadcast) = true;
  /// Allow views and aliases of parameters that exist already, which stay at their present values.
  TORCH_ARG(bool, allow_aliases) = false;
};

/// What parallelize() did. All copies are the same one; the model does not need it.
class SHARDWISE_API TensorParallel {
 public:
  /// The collectives along the axis so far, of all layers of the call.
  const Counters& counters() const;
  /// A line for each parameter: its name, its sizes, this rank's piece.
  std::string table() const;

 private:
  struct State;
  explicit TensorParallel(std::shared_ptr<const State> state) : state_(std::move(state)) {}
  friend SHARDWISE_API TensorParallel parallelize(
      torch::nn::Module& module, const Mesh& mesh, const std::string& axis, const SplitPlan& plan,
      const ParallelizeOptions& options);

  std::shared_ptr<const State> state_;
};

/// Tensor parallelism: each rank along the axis has a piece of the parameters that the plan names, and computes with
/// it. The model needs no change, and its modules may be called in any way: a parameter becomes this rank's piece in
/// place, and the operations that read it (linear, addmm, mm, matmul with the weight or its transpose, embedding) work
/// on all ranks together. Any other operation under autograd is an Error that names the parameter. Where autograd is
/// off, as in an optimizer, the piece is a tensor like any other.
///
/// The ranks along the axis get the same inputs, and must run the same operations in the same order. What they compute
/// with whole activations (dropout too) must be the same on all: seed their generators alike. Dropout on pieces then
/// draws the same numbers for different features.
///
/// Call it before fully_shard() and replicate(), which take Mesh::along() the other axes, and before the optimizer has
/// state. Of torch's own modules it divides Linear, Embedding and MultiheadAttention. The latter takes its sizes from
/// its options, so that it needs colwise().gather_output(), and rowwise().split_input() for `out_proj`.
///
/// Raises ValueError, the same on all ranks, for a pattern that fits nothing and for what cannot be divided.
SHARDWISE_API TensorParallel parallelize(
    torch::nn::Module& module, const Mesh& mesh, const std::string& axis, const SplitPlan& plan,
    const ParallelizeOptions& options = {});

/// The same for a module holder or a shared_ptr to a module.
template <detail::HoldsModule Holder>
TensorParallel parallelize(
    const Holder& holder, const Mesh& mesh, const std::string& axis, const SplitPlan& plan,
    const ParallelizeOptions& options = {}) {
  return parallelize(detail::module_in(holder), mesh, axis, plan, options);
}

} // namespace shardwise
