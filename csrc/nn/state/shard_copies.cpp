// Handles copies that torch::nn makes of a shard: to() puts them in the shard's place, clone() into another module.
#include "engine/front_end.h"
#include "nn/touch/touch.h"
#include "split/split_parameter.h"

#include <shardwise/error.h>

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/GradMode.h>
#include <c10/util/StringUtil.h>
#include <torch/library.h>

namespace shardwise::nn {
namespace {

/// The last copy of a shard that this thread made.
struct LastCopy {
  c10::weak_intrusive_ptr<at::TensorImpl> copy{c10::intrusive_ptr<at::TensorImpl>()};
  std::weak_ptr<engine::Unit> unit;
  std::string parameter;
};
LastCopy& last_copy() {
  thread_local LastCopy value;
  return value;
}

/// The copy of a shard keeps the touch key, so that the touch trigger notices a set_data() with it.
void run_copy(const c10::OperatorHandle& operation, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  const at::Tensor source = torch::jit::peek(*stack, 0, operation.schema().arguments().size()).toTensor();
  run_touched(operation, keys, stack);
  const at::Tensor& copy = stack->back().toTensor();
  if (const auto view = split::find_split(source)) {
    split::add_split_view(copy, *view);
    return add_touch_key(copy);
  }
  const auto unit = engine::unit_of_shard(source);
  if (!unit) return;
  add_touch_key(copy);
  auto& last = last_copy();
  last.copy = c10::weak_intrusive_ptr<at::TensorImpl>(copy.getIntrusivePtr());
  last.unit = unit;
  last.parameter = unit->parameter_of_shard(source)->name();
}

// Cloneable::clone() switches grad mode off. A copy made with grad mode on is a program's own snapshot, and left alone.
void run_clone(const c10::OperatorHandle& operation, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  c10::GradMode::is_enabled() ? run_touched(operation, keys, stack) : run_copy(operation, keys, stack);
}

/// A piece of a split parameter stays one, whatever memory it gets, and no other tensor becomes one.
void keep_split(const at::Tensor& target, const at::Tensor& source) {
  const auto parameter = split::split_parameter_of(target);
  if (!parameter) {
    const auto copied = split::find_split(source);
    if (!copied) return;
    throw Error(c10::str(
        "shardwise: rank ", copied->parameter->axis->mesh.rank(),
        ": clone() or set_data() was about to put a copy of '", copied->parameter->name,
        "' into another tensor, but it is only this rank's piece along axis '", copied->parameter->axis->name,
        "'. A module cannot be cloned after parallelize(): make a new one, call parallelize() on it too, and copy "
        "these parameters() into its parameters() with copy_()."));
  }
  if (source.sizes() != target.sizes()) {
    throw ValueError(c10::str(
        "shardwise: rank ", parameter->axis->mesh.rank(), ": '", parameter->name, "' was about to get values of sizes ",
        source.sizes(), ", but this rank has a piece of sizes ", target.sizes(), " along axis '", parameter->axis->name,
        "'. Load whole values with load_full_state_dict()."));
  }
  split::split_moved();
  add_touch_key(source);
}

/// Sees set_data(), which asks this first (T24 in docs/coverage.md). It uses no memory of its arguments, so it is no
/// touch.
void run_set_data(const c10::OperatorHandle& operation, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  const auto& target = torch::jit::peek(*stack, 0, 2).toTensor();
  const auto& source = torch::jit::peek(*stack, 1, 2).toTensor();
  keep_split(target, source);
  const auto& last = last_copy();
  const auto made = last.copy.lock();
  if (made && source.unsafeGetTensorImpl() == made.get()) {
    const auto unit = last.unit.lock();
    if (unit && !engine::unit_of_shard(target)) {
      throw Error(c10::str(
          "shardwise: rank ", unit->mesh().rank(), ": clone() or set_data() was about to put a copy of the shard of '",
          last.parameter,
          "' into a tensor that is not a shard. A module would then compute with the shard as if it were the whole "
          "parameter. A module cannot be cloned after fully_shard(): make a new one, call fully_shard() on it too, and "
          "copy these parameters() into its parameters() with copy_()."));
    }
  }
  run_untouched(operation, keys, stack);
}

} // namespace

TORCH_LIBRARY_IMPL(aten, DeferredInit, library) {
  for (const char* name : {"to.device", "to.dtype", "to.dtype_layout", "to.other"}) {
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&run_copy>());
  }
  library.impl("clone", torch::CppFunction::makeFromBoxedFunction<&run_clone>());
  library.impl("_has_compatible_shallow_copy_type", torch::CppFunction::makeFromBoxedFunction<&run_set_data>());
}

} // namespace shardwise::nn
