#pragma once

#include <shardwise/counters.h>
#include <shardwise/detail/export.h>
#include <shardwise/detail/holder.h>
#include <shardwise/plan.h>

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace shardwise {

/// The sizes that one of parameters() has in the plain module, where a shard has fewer rows, or one dimension only. For
/// groups of an optimizer that go by dimensions: `whole_sizes(parameter).size() > 1`.
SHARDWISE_API std::vector<int64_t> whole_sizes(const at::Tensor& parameter);

namespace engine {
class Unit;
}

/// A collective of the user's own, called like _allgather_base or _reduce_scatter_base of ProcessGroup. It may return
/// null if the output is complete.
using CustomCollective =
    std::function<c10::intrusive_ptr<c10d::Work>(at::Tensor& output, at::Tensor& input, c10d::ProcessGroup& group)>;

/// An unshard() under way.
class SHARDWISE_API UnshardHandle {
 public:
  /// Unit::unshard() calls it.
  explicit UnshardHandle(std::weak_ptr<engine::Unit> unit) : unit_(std::move(unit)) {}
  /// Returns when the full parameters are there. Does nothing the second time.
  void wait();

 private:
  std::weak_ptr<engine::Unit> unit_;
};

/// The sums that finalize_backward() started.
class SHARDWISE_API GradientReductionHandle {
 public:
  /// Unit::finalize_backward() calls it.
  GradientReductionHandle(std::weak_ptr<engine::Unit> unit, int64_t number) : unit_(std::move(unit)), number_(number) {}
  /// Returns when the gradients are in place. Does nothing the second time. Raises Error if reset_iter_state() dropped
  /// them.
  void wait();

 private:
  std::weak_ptr<engine::Unit> unit_;
  int64_t number_;
};

/// A handle on one call of replicate() or fully_shard(): cheap to copy, and owns no parameter. All ranks must call the
/// same methods in the same order. Setters return the handle; with `recurse` they set the units below this one too.
class SHARDWISE_API Unit {
 public:
  /// The functions replicate(), fully_shard() and unit() call it.
  explicit Unit(std::shared_ptr<engine::Unit> unit);

  /// The name of the module within the outermost wrapped module; "" for the outermost.
  const std::string& name() const;

  /// Whether backward averages gradients over the ranks (default). While it is off, gradients add up outside of .grad,
  /// and the next backward with it on averages the sum. Read when a backward reaches the model, for all of it.
  Unit& set_requires_gradient_sync(bool value, bool recurse = true);
  /// What set_requires_gradient_sync() set.
  bool requires_gradient_sync() const;
  /// On a mesh of two axes, and for a replicated unit: whether backward also averages over the ranks with copies
  /// (default). While it is off, the sum over shards is put aside, and the next backward with it on averages all of it.
  /// Read together with the flag above.
  Unit& set_requires_all_reduce(bool value, bool recurse = true);
  /// The divisor of the sum of the gradients, in this unit alone. Default: the number of ranks of the mesh.
  Unit& set_gradient_divide_factor(double factor);
  /// Whether to divide after the sum instead of before it, in this unit alone.
  Unit& set_force_sum_reduction(bool value);
  /// Calls `hook` for each group of this unit's gradients, with this rank's part of the sum over all ranks, before it
  /// reaches .grad. The hook may change the values. An empty function removes it.
  Unit& set_all_reduce_hook(const std::function<void(at::Tensor& sum)>& hook);
  /// Calls `collective` in place of this unit's all-gathers. An empty function ends that. Counters count the calls.
  /// All ranks must set the same. It should start a collective and return its Work, but not wait for it: on a mesh of
  /// two axes each rank decides when its second sums start, so ranks that wait here could wait for each other for ever.
  Unit& set_custom_all_gather(const CustomCollective& collective);
  /// The same for this unit's reduce-scatters.
  Unit& set_custom_reduce_scatter(const CustomCollective& collective);
  /// Whether this unit's gathers and sums use memory that their process groups provide (default: no): NCCL's is known
  /// to the network beforehand, and sending needs fewer of a GPU's cores. Such memory serves its process group alone,
  /// so the pool keeps more. All ranks must set the same. Raises Error if a process group has no such memory, or if the
  /// unit has collectives of the user's own.
  Unit& set_memory_from_process_group(bool value);
  /// Accepted for programs that follow torch's, without effect: gradients are always in place when a backward returns.
  Unit& set_is_last_backward(bool /*value*/) {
    return *this;
  }
  /// Whether the program itself ends a backward of this tree, with finalize_backward() after one backward or several:
  /// for schedules that sum gradients in a step of their own.
  Unit& set_manual_backward_finalization(bool value);
  /// Sums all gradients that are not summed yet, also those of backwards without synchronisation, and frees full
  /// parameters. With `async` this only starts; wait() of the result ends it.
  GradientReductionHandle finalize_backward(bool async = false);
  /// How many sums of gradients, each with its buffer, may be under way at a time in this tree (default: 1). The
  /// largest number of its units counts. Read when a backward begins. Raises ValueError for less than 1.
  Unit& set_reduce_scatter_max_input_buffers(int64_t count, bool recurse = true);
  /// Whether a parameter that no rank used gets a gradient of zeros instead of none.
  Unit& set_reduce_scatter_unused_params(bool value, bool recurse = true);

  // The rest is about full copies of sharded parameters. Most replicated units have none, and these do nothing then.

  /// Gathers the full parameters of this unit alone. With `async` this only starts; wait() of the result ends it.
  UnshardHandle unshard(bool async = false);
  /// Frees the full parameters of this unit alone.
  Unit& reshard();
  /// Whether full parameters are freed after this unit's forward (default: yes, except for the outermost unit). Read
  /// when the forward ends.
  Unit& set_reshard_after_forward(bool value, bool recurse = true);
  /// Whether full parameters are freed after this unit's backward (default: yes). Read when the backward ends.
  Unit& set_reshard_after_backward(bool value, bool recurse = true);
  /// Whether full parameters have the same memory, and so the same addresses, each time (default: no). Read when they
  /// are freed.
  Unit& set_keep_unsharded_storage(bool value, bool recurse = true);
  /// Whether a backward that reaches this unit gathers its full parameters at once (default). If not, an operation that
  /// needs them does.
  Unit& set_unshard_in_backward(bool value);
  /// Whether units of this tree are gathered ahead, while others compute, in the order of the last forward or backward
  /// (default). This takes the full parameters of one more unit; results and the number of collectives stay the same.
  Unit& set_prefetch(bool value);
  /// Units whose gathers start when this one begins its forward, instead of the unit that followed it in the last
  /// forward.
  Unit& set_forward_prefetch(const std::vector<Unit>& units);
  /// Units whose gathers start when this one begins its backward, instead of the unit that followed it in the last
  /// backward.
  Unit& set_backward_prefetch(const std::vector<Unit>& units);
  /// The next forward of this tree gathers only after this event, on the device: for an optimizer on a stream of its
  /// own. unshard() and state dicts before that forward wait for the event too. No effect on CPUs.
  Unit& set_post_optim_event(std::shared_ptr<c10::Event> event);
  /// Frees the memory that is kept for the next step and not in use: of this tree on a device, of the process on a CPU.
  /// The next step allocates it again.
  Unit& free_idle_memory();
  /// Forgets a forward or backward that failed: all units of the tree are sharded then, and no gradient is on its way.
  /// A backward that throws does this itself.
  Unit& reset();
  /// Does the same, and drops gradients that are not in .grad yet: sums under way, and those of backwards without
  /// synchronisation.
  Unit& reset_iter_state();

  /// What this unit and the units below it will do in a step.
  Plan plan() const;
  /// What this unit and the units below it have done so far.
  Counters counters() const;

 private:
  static std::vector<std::weak_ptr<engine::Unit>> calls_of(const std::vector<Unit>& units);
  friend SHARDWISE_API void share_comm_context(const std::vector<Unit>& units);

  std::shared_ptr<engine::Unit> unit_;
};

/// From now on the trees of these units share one pool of memory for collectives: for roots that run one after the
/// other. Does nothing for an empty list.
SHARDWISE_API void share_comm_context(const std::vector<Unit>& units);

/// The handle of a module that replicate() or fully_shard() wrapped. Raises ValueError for any other.
SHARDWISE_API Unit unit(const torch::nn::Module& module);

/// The same for a module holder or a shared_ptr to a module.
template <detail::HoldsModule Holder>
Unit unit(const Holder& holder) {
  return unit(static_cast<const torch::nn::Module&>(*holder));
}

} // namespace shardwise
