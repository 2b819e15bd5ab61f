#pragma once

#include <shardwise/call.h>
#include <shardwise/detail/holder.h>
#include <shardwise/mesh.h>

#include <ATen/core/Tensor.h>
#include <torch/arg.h>

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace shardwise {

/// In which order the ranks of a pipeline work. docs/parallelism.md compares them.
enum class PipelineSchedule : uint8_t {
  gpipe,
  one_forward_one_backward,
  /// These have several stages on a rank: stage s on rank s % ranks.
  interleaved,
  looped_bfs,
  interleaved_zero_bubble,
  /// These have two stages on a rank: rank r has r and 2 * ranks - 1 - r.
  zero_bubble_v,
  dual_pipe_v
};

/// What one stage computes of a microbatch, and the module that has its parameters.
struct SHARDWISE_API PipelineStage {
  /// The inputs or the outputs of a stage, in order.
  using Tensors = std::vector<at::Tensor>;

  /// From the outputs of the stage before (the first stage: the inputs of step()) to its own.
  std::function<Tensors(const Tensors& inputs)> forward;
  /// If fully_shard() or replicate() wrapped it or modules in it, their gradients are summed once a step. May be null.
  std::shared_ptr<torch::nn::Module> module;

  /// A stage of any function, which may take and return several tensors.
  PipelineStage(std::function<Tensors(const Tensors&)> forward, std::shared_ptr<torch::nn::Module> module)
      : forward(std::move(forward)),
        module(std::move(module)) {}
  /// A holder of a module whose forward takes a tensor and returns one.
  template <typename Holder>
  requires requires(const Holder& holder) {
    holder.ptr();
  }
  PipelineStage(const Holder& holder)
      : forward([own = Holder(holder)](const Tensors& inputs) mutable { return Tensors{call(own, inputs.at(0))}; }),
        module(holder.ptr()) {}
};

/// The options of a Pipeline. Everything has a default, but step() needs a loss.
struct SHARDWISE_API PipelineOptions {
  /// The outputs or the targets of a microbatch, in order.
  using Tensors = std::vector<at::Tensor>;
  /// Returns the loss of a microbatch.
  using Loss = std::function<at::Tensor(const Tensors& outputs, const Tensors& targets)>;

  /// The order of forwards and backwards on each rank.
  TORCH_ARG(PipelineSchedule, schedule) = PipelineSchedule::one_forward_one_backward;
  /// A batch is cut into this many parts along dimension 0, as equal as can be.
  TORCH_ARG(int64_t, microbatches) = 1;
  /// How many stages each rank has, if the schedule has several.
  TORCH_ARG(int64_t, stages_per_rank) = 2;
  /// A scalar: the mean over the rows of a microbatch. Needed for step().
  TORCH_ARG(Loss, loss) = {};
  /// Whether gradients are those of the mean over the whole batch; if not, of the sum of the microbatches' losses.
  TORCH_ARG(bool, mean) = true;
  /// Whether units of stages keep full parameters from their first forward in a step to their last backward: one gather
  /// a step, for the memory of a stage. If not, the options of the units decide.
  TORCH_ARG(bool, gather_once) = true;
};

/// What Pipeline::step() and Pipeline::evaluate() return.
struct SHARDWISE_API PipelineResult {
  /// One for each microbatch, without gradients. Empty on ranks that do not have the last stage, as `outputs`.
  std::vector<at::Tensor> losses = {};
  /// Of the whole batch. Only evaluate() returns them.
  std::vector<at::Tensor> outputs = {};
  /// How long the step took on this rank, on the host's clock.
  double seconds = 0;
  /// For how much of that this rank's stages computed.
  double busy_seconds = 0;
};

/// Runs a model whose stages lie on the ranks along an axis of a mesh: a batch is cut into microbatches, which go from
/// stage to stage, forward and back. Gradients are those that one process would compute; the optimizer is the
/// program's.
///
/// Each rank makes its own stages, and wraps them before or in `make`. All ranks call the same methods. An error on one
/// rank is raised on all; drop the gradients of that step then (zero_grad()).
class SHARDWISE_API Pipeline {
 public:
  /// The inputs or the targets of a batch, in order.
  using Tensors = std::vector<at::Tensor>;

  /// `make` is called for each stage that this rank has, with its number.
  /// Raises ValueError for options that do not fit the schedule or the number of ranks.
  Pipeline(
      const Mesh& mesh, const std::string& axis, const std::function<PipelineStage(int64_t stage)>& make,
      const PipelineOptions& options);
  ~Pipeline();
  ///@{
  /// Takes over the other one's stages. The other one can then only be destroyed or assigned to.
  Pipeline(Pipeline&&) noexcept;
  Pipeline& operator=(Pipeline&&) noexcept;
  ///@}

  /// The stages that a rank of such a pipeline has.
  static std::vector<int64_t> stages_of(const Mesh& mesh, const std::string& axis, const PipelineOptions& options);
  /// How many stages all ranks have together.
  int64_t stages() const;
  /// Forward and backward of a batch. The rank with the first stage gives the inputs, and the rank with the last stage
  /// the targets. Arguments of other ranks have no effect.
  PipelineResult step(const Tensors& inputs = {}, const Tensors& targets = {});
  /// Forward only, without gradients. Losses are there if there are targets and a loss.
  PipelineResult evaluate(const Tensors& inputs = {}, const Tensors& targets = {});
  /// What each rank does in a step, a line for each.
  std::string table() const;
  /// The share of a step in which each rank computes nothing, if stages are alike, a backward takes twice as long as a
  /// forward, and what goes from rank to rank takes no time.
  std::vector<double> bubble() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

} // namespace shardwise
