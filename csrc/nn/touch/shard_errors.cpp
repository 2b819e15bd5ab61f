#include "nn/touch/shard_errors.h"

#include "base/caller.h"
#include "nn/touch/mixing.h"
#include "nn/touch/pieces.h"

#include <shardwise/error.h>

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <mutex>
#include <set>

namespace shardwise::nn {
namespace {

std::string name_of(const group::Parameter* parameter) {
  return parameter == nullptr ? "?" : parameter->name();
}

constexpr auto kExchange =
    "shardwise::clip_grad_norm_() and an optimizer that works element by element; or combine the number over all ranks "
    "first, with an all-reduce on the mesh's process group.";

bool first_time(const engine::Unit& unit) {
  static std::mutex mutex;
  static auto* told = new std::set<int64_t>;
  const auto* root = &unit;
  while (root->outer()) root = root->outer().get();
  const std::lock_guard lock(mutex);
  return told->insert(root->number()).second;
}

constexpr auto kRemedy =
    " shardwise::with_whole_parameters() gives whole, writable parameters to a function of yours; "
    "shardwise::full_state_dict() gives copies.";

[[noreturn]] void refuse(
    const engine::Unit& unit, const group::Parameter& parameter, const Touch& touch, const std::string& what) {
  throw Error(c10::str(
      "shardwise: rank ", unit.mesh().rank(), ": ", touch.operation.operator_name(), " got ",
      is_piece_of_gradient(parameter, touch.tensor) ? "the gradient of " : "", "the shard of '", parameter.name(),
      "', of sizes ", touch.tensor.sizes(), what, kRemedy));
}

bool is_among(const std::string& name, std::initializer_list<const char*> names) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

/// Whether a function of a sum has another gradient than its parts.
bool is_curved(const std::string& name) {
  return is_among(name, {"aten::abs",    "aten::clamp",   "aten::clamp_max",  "aten::clamp_min",
                         "aten::exp",    "aten::log",     "aten::log1p",      "aten::linalg_vector_norm",
                         "aten::max",    "aten::maximum", "aten::min",        "aten::minimum",
                         "aten::norm",   "aten::pow",     "aten::reciprocal", "aten::relu",
                         "aten::rsqrt",  "aten::sigmoid", "aten::softplus",   "aten::sqrt",
                         "aten::square", "aten::tanh"});
}

constexpr auto kPenalty =
    ": the gradient of this would be that of the piece alone. A penalty may be a sum of elements; another needs the "
    "module's member in the place of its shard. If the module itself takes the parameter from its registry, name it in "
    "FullyShardOptions().whole_parameters().";

bool draws_in_place(const std::string& name) {
  return is_among(
      name, {"aten::uniform_", "aten::normal_", "aten::random_", "aten::bernoulli_", "aten::exponential_",
             "aten::cauchy_", "aten::log_normal_", "aten::geometric_"});
}

bool writes_in_place(const std::string& name) {
  return name.ends_with('_') || name == "aten::eye";
}

} // namespace

void refuse_write_to_full(const engine::Unit& unit, const Touch& touch) {
  if (touch.operation.operator_name().name == "aten::record_stream") {
    throw Error(c10::str(
        "shardwise: rank ", unit.mesh().rank(), ": record_stream() was called on the full copy of '",
        name_of(unit.parameter_at(touch.tensor)),
        "', whose memory does not go back to torch's allocator but to the next unit. Instead make the current stream "
        "wait, by an event, for what the other stream does with it, before the unit ends."));
  }
  throw Error(c10::str(
      "shardwise: rank ", unit.mesh().rank(), ": ", touch.operation.operator_name(),
      " was about to write to the full copy of '", name_of(unit.parameter_at(touch.tensor)),
      "', and the write would be lost: the values of a sharded parameter live in the shards of all ranks. Change it "
      "in shardwise::with_whole_parameters(), or before fully_shard(). If an optimizer did this, make it after "
      "fully_shard()."));
}

void refuse_absent_gradient(const engine::Unit& unit, const Touch& touch) {
  std::string name = "?";
  for (const auto& parameter : unit.parameters()) {
    const auto& absent = parameter->absent_gradient();
    if (absent.defined() && absent.is_alias_of(touch.tensor)) name = parameter->name();
  }
  throw Error(c10::str(
      "shardwise: rank ", unit.mesh().rank(), ": ", touch.operation.operator_name(),
      " was about to use the gradient of the full copy of '", name,
      "', which has none: the averaged gradient is in the .grad of its shard. An optimizer that was made before "
      "fully_shard() or replicate(), or from the module's members, holds full copies and would never change a weight. "
      "Make it after wrapping, from the module's parameters()."));
}

void refuse_local_values(const engine::Unit& unit, const group::Parameter& parameter, const Touch& touch) {
  throw Error(c10::str(
      "shardwise: rank ", unit.mesh().rank(), ": ", touch.operation.operator_name(), " was about to change '",
      parameter.name(),
      "' or its gradient by values that were computed from this rank's shards alone, such as a norm, a mean or a "
      "product of weights or gradients, or some of their rows, and so differ between ranks. "
      "torch::nn::utils::clip_grad_norm_ and torch::optim::LBFGS do this. Change whole weights in "
      "shardwise::with_whole_parameters(); for gradients use ",
      kExchange));
}

void refuse_write_by_place(const engine::Unit& unit, const group::Parameter& parameter, const Touch& touch) {
  const auto cut = cut_of(parameter, touch.tensor);
  if (!cut.has_all_rows(touch.tensor)) {
    refuse(
        unit, parameter, touch,
        ": it is about to write to some rows of it, which are other rows of the whole on each rank.");
  }
  if (writes_in_place(touch.operation.operator_name().name) &&
      mixes_places(touch.operation, touch.arguments, touch.tensor, cut.dimension_in(touch.tensor))) {
    refuse(
        unit, parameter, touch,
        ": it is about to write to elements by their place in it, which is another place of the whole on each rank.");
  }
}

void refuse_what_needs_the_whole(const engine::Unit& unit, const group::Parameter& parameter, const Touch& touch) {
  const auto& name = touch.operation.operator_name().name;
  if (touch.written) {
    if (draws_in_place(name)) {
      refuse(
          unit, parameter, touch,
          ": every rank would draw numbers for its own piece, as if it were the whole parameter.");
    }
    refuse_write_by_place(unit, parameter, touch);
  } else if (name == "aten::view_as") {
    refuse(
        unit, parameter, touch,
        ", as the sizes of a whole parameter. torch::nn::utils::vector_to_parameters and "
        "torch::optim::LBFGS do this. Use an optimizer that works element by element.");
  } else if (is_followed_by_autograd(touch.tensor)) {
    const auto cut = cut_of(parameter, touch.tensor).dimension_in(touch.tensor);
    if (mixes_places(touch.operation, touch.arguments, touch.tensor, cut) &&
        !(parameter.alive() && sums_all(touch.operation, touch.arguments, parameter.full().dim()))) {
      refuse(unit, parameter, touch, kPenalty);
    }
  }
  // A load of an archive puts other memory into the shard. The next use checks it.
  if (name == "aten::set_") return;
  const auto numel = touch.tensor.numel();
  for (const auto& value : touch.arguments) {
    if (!value.isTensor() || !value.toTensor().defined() || value.toTensor().numel() <= numel) continue;
    if (!parameter.alive() || value.toTensor().sizes() != parameter.full().sizes()) continue;
    refuse(
        unit, parameter, touch,
        c10::str(
            ", together with a tensor of sizes ", value.toTensor().sizes(),
            ", those of the whole parameter. An average of weights, a target network or the state of an optimizer must "
            "be kept in the sizes of the shards, or be given whole ones."));
  }
}

void refuse_penalty_of_values(const Touch& touch, Local local, std::optional<int64_t> cut) {
  if (!is_followed_by_autograd(touch.tensor)) return;
  const bool is_right = local == Local::sum ? !is_curved(touch.operation.operator_name().name)
                                            : sums_all(touch.operation, touch.arguments, touch.tensor.dim()) ||
                                                  !mixes_places(touch.operation, touch.arguments, touch.tensor, cut);
  if (is_right) return;
  throw Error(c10::str(
      "shardwise: ", touch.operation.operator_name(), " got values that were computed from this rank's shards alone",
      kPenalty));
}

std::string explain_local_result(const std::string& operation) {
  return c10::str(
      "shardwise: ", operation,
      " got values that were computed from this rank's shards alone, and a rank may have none. "
      "torch::nn::utils::clip_grad_norm_ and torch::optim::LBFGS do this. Use ",
      kExchange);
}

void refuse_first_gradient(
    const group::Parameter& parameter, const std::weak_ptr<UnverifiedParameters>& unverified,
    const std::weak_ptr<engine::Unit>& unit) {
  const auto* one = &parameter;
  parameter.add_shard_hook([one, unverified, unit](const at::TensorBase& /*gradient*/) {
    base::called_by_torch([&] {
      const auto open = unverified.lock();
      const auto owner = unit.lock();
      if (!open || !owner || !open->contains(one)) return;
      throw Error(c10::str(
          "shardwise: rank ", owner->mesh().rank(), ": a gradient came to the shard of '", one->name(),
          "', but the full parameter was never used. Either its module takes the parameter from its registry, which "
          "has only this rank's shard: then give the module a member that holds it, or name it in "
          "FullyShardOptions().whole_parameters(). Or only a term of the loss uses it: then name it there too."));
    });
    return at::TensorBase();
  });
}

void warn_of_concatenated_shards(const engine::Unit& unit, const group::Parameter& parameter, const Touch& touch) {
  if (touch.operation.operator_name().name != "aten::cat" || !first_time(unit)) return;
  TORCH_WARN(
      "shardwise: rank ", unit.mesh().rank(), ": torch::cat got the shard of '", parameter.name(),
      "', so its result has this rank's shards only, not whole parameters. torch::nn::utils::parameters_to_vector does "
      "this too. Call full_state_dict() for whole parameters. (This warning comes once for each model.)");
}

void warn_of_local_number() {
  TORCH_WARN_ONCE(
      "shardwise: item() read a number that was computed from this rank's shards alone, such as a norm or a mean of "
      "weights or gradients. Other ranks have other numbers. For that of the whole model use ",
      kExchange, " (This warning comes once.)");
}

std::string why_sizes_differ(const engine::Unit& unit, const group::Parameter& parameter, const Touch& touch) {
  if (!parameter.alive()) return "";
  const auto shard = parameter.live_shard()->sizes();
  const auto whole = parameter.full().sizes().vec();
  const bool has_whole = std::any_of(touch.arguments.begin(), touch.arguments.end(), [&](const auto& value) {
    return value.isTensor() && value.toTensor().defined() && value.toTensor().sizes() == whole;
  });
  if (shard == whole || !has_whole) return "";
  return c10::str(
      "shardwise: rank ", unit.mesh().rank(), ": ", touch.operation.operator_name(), " got the shard of '",
      parameter.name(), "' or its gradient, of sizes ", shard, ", together with a tensor of sizes ",
      at::IntArrayRef(whole),
      ", those of the whole parameter. The state of an optimizer that was saved for whole parameters does not fit "
      "shards: load state that this model saved on the same number of ranks, each rank its own; or give whole tensors "
      "to load_full_optimizer_state_dict().");
}

std::string why_dtypes_differ(const engine::Unit& unit, const c10::OperatorHandle& operation) {
  const auto dtype = unit.precision().param_dtype();
  if (!dtype || operation.operator_name().name != "aten::batch_norm") return "";
  return c10::str(
      "shardwise: rank ", unit.mesh().rank(), ": a batch norm of unit '", unit.name(), "' has its parameters in ",
      c10::getDtypeNames(*dtype).first,
      " (param_dtype), but its running statistics keep their dtype. Let its parameters keep theirs too: "
      "MixedPrecision().param_dtype_override() says it for single parameters.");
}

} // namespace shardwise::nn
