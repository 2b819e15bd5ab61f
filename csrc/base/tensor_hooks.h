#pragma once

#include <ATen/core/Tensor.h>

#include <functional>

namespace shardwise::base {

/// May return another gradient, or an undefined one: then it stays as it is.
using TensorHook = std::function<at::TensorBase(const at::TensorBase&)>;

/// Registers a hook on the gradients of a leaf, whether it is trained now or not, beside those that the program
/// registered, in either language. A tensor can own something by one, even through set_data(). Python's first
/// register_hook() on a tensor clears all that were there.
void add_hook(const at::Tensor& leaf, TensorHook hook);

/// Whether the leaf has hooks, but for those that `is_other` names.
bool has_hooks(const at::Tensor& leaf, bool (*is_other)(const TensorHook& hook));
/// The gradient after these hooks.
at::Tensor run_hooks(const at::Tensor& leaf, at::Tensor gradient, bool (*is_other)(const TensorHook& hook));

/// The first such hook of the leaf; null if there is none.
const TensorHook* find_hook(const at::Tensor& leaf, bool (*is_one)(const TensorHook& hook));

} // namespace shardwise::base
