#pragma once

#include <shardwise/detail/export.h>
#include <shardwise/detail/holder.h>
#include <shardwise/link.h>
#include <shardwise/options.h>

#include <torch/arg.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace shardwise {

/// More options of estimate_memory(). Everything has a default.
struct SHARDWISE_API EstimateOptions {
  /// Modules inside of it that will be units of their own, with the same options, in the order of wrapping.
  TORCH_ARG(std::vector<const torch::nn::Module*>, units) = {};
  /// How many ranks have copies of each shard: the size of the first axis of a mesh of two axes.
  TORCH_ARG(int64_t, copies) = 1;
  /// The rank to estimate for, among those with different shards. The first ones have most.
  TORCH_ARG(int64_t, rank) = 0;
  /// Bytes of optimizer state for each byte of a parameter: 2 for Adam, 1 for momentum, 0 for plain SGD.
  TORCH_ARG(double, optimizer_factor) = 2;
  /// The kind of device to train on: sums wait for other things on a CPU than elsewhere. Unset: that of a mesh made
  /// here, a GPU if there is one.
  TORCH_ARG(std::optional<c10::DeviceType>, device) = std::nullopt;
  /// The argument that Unit::set_reduce_scatter_max_input_buffers() will get.
  TORCH_ARG(int64_t, reduce_scatter_max_input_buffers) = 1;
  /// The argument that Unit::set_keep_unsharded_storage() will get.
  TORCH_ARG(bool, keep_unsharded_storage) = false;
};

/// Bytes of one rank's tensors, without activations, temporary memory of operations, and memory that a process group
/// allocates itself (Gloo: as much as it gathers or sums at a time).
struct SHARDWISE_API MemoryEstimate {
  /// What parameters() returns: shards with their padding, or whole parameters.
  int64_t parameters = 0;
  /// Buffers, which every rank has whole.
  int64_t buffers = 0;
  /// The optimizer's state: EstimateOptions().optimizer_factor() times those of the parameters that are trained.
  int64_t optimizer = 0;
  /// The sums of which averaged gradients are views. Their memory is free from zero_grad() and the next forward on,
  /// until the next sum.
  int64_t gradients = 0;
  /// Memory for full parameters, gathers and buckets that stays for the next step. On a CPU none does.
  int64_t pool = 0;
  /// Gradients of whole parameters before they are summed, at the point of backward that has most of them.
  int64_t unsummed_gradients = 0;
  /// The most at any time of a forward, everything together.
  int64_t forward_peak = 0;
  /// The most at any time of a backward, everything together.
  int64_t backward_peak = 0;
  /// What is left after the optimizer's step, everything together.
  int64_t after_step = 0;

  /// A line for each number in megabytes, with bars.
  std::string table() const;
  /// One JSON object, whose keys are the names of these members.
  std::string json() const;
};

/// Seconds of one step of a rank.
struct SHARDWISE_API TimeEstimate {
  /// What it computes, as it was given.
  double compute = 0;
  /// How long the rank's collectives travel.
  double wire = 0;
  /// From its begin to its end: to compute, and to wait for what travels.
  double step = 0;

  /// A line for each number in milliseconds, with bars.
  std::string table() const;
  /// One JSON object, whose keys are the names of these members.
  std::string json() const;
};

/// Estimates the memory that fully_shard(module, options) and the training after it will need on one of `world` ranks,
/// once a few steps are done. It allocates nothing and needs no mesh; the module may be on the meta device.
///
/// It assumes that each unit runs once in a forward, in the order in which the module has them; that every trained
/// parameter gets a gradient; that sums of gradients keep up with backward; and that gradients are set to none before
/// the next forward. A module that is wrapped already is an Error.
SHARDWISE_API MemoryEstimate estimate_memory(
    const torch::nn::Module& module, const FullyShardOptions& options, int64_t world, const EstimateOptions& more = {});

/// The same for replicate(module, options).
SHARDWISE_API MemoryEstimate estimate_memory(
    const torch::nn::Module& module, const ReplicateOptions& options, int64_t world, const EstimateOptions& more = {});

/// Estimates how long a step will take, of which a rank computes for `compute` seconds: as long as a step of forward
/// and backward takes without other ranks. Assumes what estimate_memory() does, and that
///
/// - the time to compute goes to parameters of two dimensions or more, in proportion to their elements: a third in
///   forward, the rest in backward. Those that only embeddings have take none;
/// - collectives go one after the other, while ranks compute. Each takes its link's latency, and the time of the bytes
///   that a rank, or all ranks of a host, get in it: N - 1 parts of a gather of N ranks, as many of a sum that is
///   scattered, twice that of an all-reduce. The slowest link decides.
SHARDWISE_API TimeEstimate estimate_time(
    const torch::nn::Module& module, const FullyShardOptions& options, int64_t world, const Links& links,
    double compute, const EstimateOptions& more = {});

/// The same for replicate(module, options).
SHARDWISE_API TimeEstimate estimate_time(
    const torch::nn::Module& module, const ReplicateOptions& options, int64_t world, const Links& links, double compute,
    const EstimateOptions& more = {});

/// The same for a module holder or a shared_ptr to a module.
template <detail::HoldsModule Holder, typename Options>
MemoryEstimate estimate_memory(
    const Holder& holder, const Options& options, int64_t world, const EstimateOptions& more = {}) {
  return estimate_memory(static_cast<const torch::nn::Module&>(*holder), options, world, more);
}

template <detail::HoldsModule Holder, typename Options>
TimeEstimate estimate_time(
    const Holder& holder, const Options& options, int64_t world, const Links& links, double compute,
    const EstimateOptions& more = {}) {
  return estimate_time(static_cast<const torch::nn::Module&>(*holder), options, world, links, compute, more);
}

} // namespace shardwise
