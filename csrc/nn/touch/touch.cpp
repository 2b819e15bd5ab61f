#include "nn/touch/touch.h"

#include "group/leaf_storage.h"
#include "nn/touch/local_values.h"

#include <shardwise/error.h>

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/function_schema.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/StringUtil.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <mutex>
#include <shared_mutex>
#include <unordered_map>

namespace shardwise::nn {
namespace {

/// Casts arguments of an operation that is about to run to `dtype`, which `listener` wants: floating-point tensors that
/// have no touch key, that the operation does not write to, and that the listener does not exempt. Autograd records the
/// casts.
void cast_arguments(
    const c10::FunctionSchema& schema, torch::jit::Stack& stack, at::ScalarType dtype, const TouchListener& listener) {
  const auto must_cast = [&](const c10::IValue& value) {
    if (!value.isTensor()) return false;
    const at::Tensor& tensor = value.toTensor();
    return tensor.defined() && tensor.is_floating_point() && tensor.scalar_type() != dtype && !has_touch_key(tensor) &&
           !listener.is_exempt_from_cast(tensor);
  };
  const auto cast = [&](const c10::IValue& value) { return must_cast(value) ? value.toTensor().to(dtype) : value; };
  const auto& arguments = schema.arguments();
  for (size_t i = 0; i < arguments.size(); ++i) {
    const auto* alias = arguments[i].alias_info();
    if (alias != nullptr && alias->isWrite()) continue;
    auto& value = stack[stack.size() - arguments.size() + i];
    if (value.isTensor()) {
      value = cast(value);
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const auto& element : value.toListRef()) list.push_back(cast(element).toTensor());
      value = list;
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> list;
      for (const auto& element : value.toListRef()) list.push_back(cast(element).to<std::optional<at::Tensor>>());
      value = list;
    }
  }
}

/// Gives access to the key set of a tensor, which is protected.
struct KeySet : c10::TensorImpl {
  static c10::DispatchKeySet& of(const at::Tensor& tensor) {
    return tensor.unsafeGetTensorImpl()->*(&KeySet::key_set_);
  }
};

/// Which storage has which listener. Written when leaves come and go, read at every touch.
class Listeners {
 public:
  static Listeners& get() {
    static auto* registry = new Listeners;
    return *registry;
  }

  bool add(const c10::StorageImpl* storage, const std::weak_ptr<TouchListener>& listener) {
    const std::unique_lock lock(mutex_);
    auto& entry = listeners_.try_emplace(storage, Entry{listener, 0}).first->second;
    const bool is_same = !entry.listener.owner_before(listener) && !listener.owner_before(entry.listener);
    if (is_same) ++entry.count;
    return is_same;
  }

  void remove(const c10::StorageImpl* storage) {
    const std::unique_lock lock(mutex_);
    const auto entry = listeners_.find(storage);
    if (--entry->second.count == 0) listeners_.erase(entry);
  }

  std::shared_ptr<TouchListener> find(const c10::StorageImpl* storage) const {
    const std::shared_lock lock(mutex_);
    const auto entry = listeners_.find(storage);
    return entry == listeners_.end() ? nullptr : entry->second.listener.lock();
  }

 private:
  struct Entry {
    std::weak_ptr<TouchListener> listener;
    int count = 0;
  };
  mutable std::shared_mutex mutex_;
  std::unordered_map<const c10::StorageImpl*, Entry> listeners_;
};

/// Tensors that are made from nothing, and without a device, get the meta device.
void put_on_meta(const c10::FunctionSchema& schema, torch::jit::Stack& stack) {
  const auto& arguments = schema.arguments();
  const auto values = torch::jit::last(stack, arguments.size());
  for (const auto& value : values) {
    if (value.isTensor() || value.isTensorList() || value.isOptionalTensorList()) return;
  }
  const auto index = schema.argumentIndexWithName("device");
  if (!index) return;
  auto& device = torch::jit::peek(stack, static_cast<size_t>(*index), arguments.size());
  if (device.isNone()) device = at::Device(at::kMeta);
}

[[noreturn]] void refuse(const c10::OperatorHandle& operation, const at::Tensor& tensor) {
  throw Error(c10::str(
      "shardwise: ", operation.operator_name(), " was about to use a parameter (a tensor of sizes ", tensor.sizes(),
      ") whose memory is freed, and ",
      is_watched(tensor) ? "its unit did not gather it. This is a bug in shardwise: please report it with this text."
                         : "the unit that could gather it again is gone. Keep the wrapped module alive as long as its "
                           "parameters are used."));
}

std::atomic<const Substitute*> substitute_of_process = nullptr;

/// Runs the operation, in the substitute's way if it has one.
void run_operation(const c10::OperatorHandle& operation, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  const auto* substitute = substitute_of_process.load(std::memory_order_acquire);
  if (substitute != nullptr && base::called_by_torch([&] { return substitute->run(operation, keys, *stack); })) return;
  run_untouched(operation, keys, stack);
}

/// The operation's arguments on the stack.
c10::ArrayRef<c10::IValue> arguments_of(const c10::FunctionSchema& schema, const torch::jit::Stack& stack) {
  return torch::jit::last(stack, schema.arguments().size());
}

/// A keyed argument that has a storage, and the listener of its memory, if there is one.
struct Keyed {
  std::shared_ptr<TouchListener> listener;
  const at::Tensor* tensor;
  bool written;
};
using AllKeyed = c10::SmallVector<Keyed, 4>;

AllKeyed keyed_among(const c10::FunctionSchema& schema, const torch::jit::Stack& stack) {
  AllKeyed all;
  for_each_tensor_among(arguments_of(schema, stack), [&](size_t position, const at::Tensor& tensor) {
    if (!has_touch_key(tensor) || !tensor.has_storage()) return;
    const auto* alias = schema.arguments()[position].alias_info();
    all.push_back({listener_of(tensor), &tensor, alias != nullptr && alias->isWrite()});
  });
  return all;
}

const at::Tensor* first_freed(const AllKeyed& all) {
  const auto* const freed =
      std::find_if(all.begin(), all.end(), [](const Keyed& keyed) { return group::is_freed(*keyed.tensor); });
  return freed == all.end() ? nullptr : freed->tensor;
}

/// Lets a listener that knows better say why torch refused the operation. The arguments are still on the stack: kernels
/// remove them only when they are done.
void explain(
    const c10::OperatorHandle& operation, const torch::jit::Stack& stack, const AllKeyed& before,
    const c10::Error& error) {
  const auto raise = [&](const std::string& text) {
    if (text.empty()) return;
    base::called_by_torch([&] { throw Error(c10::str(text, " torch says: ", error.what_without_backtrace())); });
  };
  const auto arguments = arguments_of(operation.schema(), stack);
  for (const auto& [listener, tensor, written] : keyed_among(operation.schema(), stack)) {
    if (listener) raise(listener->explain({operation, arguments, *tensor, written}));
  }
  for (const auto& keyed : before) {
    if (keyed.listener) raise(keyed.listener->advice(operation));
  }
}

/// A shortcut for torch::nn::Module::zero_grad(), which does this to every gradient.
at::Tensor detach(c10::DispatchKeySet keys, const at::Tensor& self) {
  static const auto operation =
      c10::Dispatcher::singleton().findSchemaOrThrow("aten::detach", "").typed<at::Tensor(const at::Tensor&)>();
  if (self.dim() > 0 && self.has_storage()) {
    const auto listener = listener_of(self);
    if (listener && listener->may_detach()) {
      const c10::impl::ExcludeDispatchKeyGuard not_a_touch(kTouchKey);
      return operation.redispatch(keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kTouchKey), self);
    }
  }
  torch::jit::Stack stack{self};
  run_touched(operation, keys, &stack);
  return std::move(stack.back()).toTensor();
}

} // namespace

std::shared_ptr<TouchListener> listener_of(const at::Tensor& tensor) {
  return Listeners::get().find(tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl());
}

bool is_watched(const at::Tensor& tensor) {
  return listener_of(tensor) != nullptr;
}

void run_untouched(const c10::OperatorHandle& operation, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  operation.redispatchBoxed(keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kTouchKey), stack);
}

void set_substitute(const Substitute& substitute) {
  substitute_of_process.store(&substitute, std::memory_order_release);
}

bool has_substitute(const at::Tensor& tensor) {
  const auto* substitute = substitute_of_process.load(std::memory_order_acquire);
  return substitute != nullptr && base::called_by_torch([&] { return substitute->concerns(tensor); });
}

void run_touched(const c10::OperatorHandle& operation, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  const bool on_meta = c10::impl::tls_is_dispatch_key_included(kTouchKey);
  // What a listener or this operation calls in turn is not a touch.
  const c10::impl::ExcludeDispatchKeyGuard not_a_touch(kTouchKey);
  const auto& schema = operation.schema();
  if (on_meta) put_on_meta(schema, *stack);
  const auto all = keyed_among(schema, *stack);
  LocalValues local;
  bool anybody_listens = false;
  for (const auto& [listener, tensor, written] : all) {
    if (!listener) continue;
    anybody_listens = true;
    local.add(operation, arguments_of(schema, *stack), listener->origin(*tensor), *tensor);
  }
  if (!anybody_listens) {
    if (const auto* tensor = first_freed(all)) refuse(operation, *tensor);
    return run_operation(operation, keys, stack);
  }
  const auto arguments = arguments_of(schema, *stack);
  std::shared_ptr<TouchListener> caster;
  Touches touches;
  const auto tell = [&](bool again) {
    bool others_were_told = again;
    for (const auto& [found, tensor, written] : all) {
      // A listener that was told before may have ended this registration.
      auto listener = others_were_told ? listener_of(*tensor) : found;
      if (!listener) continue;
      others_were_told = true;
      const Touch touch{operation, arguments, *tensor, written, local.highest(), again};
      touches.add(listener, touch);
      if (!caster && listener->wanted_dtype()) caster = std::move(listener);
    }
  };
  tell(false);
  if (first_freed(all) != nullptr) {
    tell(true);
    if (const auto* tensor = first_freed(all)) refuse(operation, *tensor);
  }
  if (caster) cast_arguments(schema, *stack, *caster->wanted_dtype(), *caster);
  if (operation.operator_name().name.starts_with("c10d::")) local.forget(arguments);
  const auto depth = stack->size();
  try {
    run_operation(operation, keys, stack);
  } catch (const c10::Error& error) {
    if (stack->size() == depth) explain(operation, *stack, all, error);
    throw;
  }
  if (local.highest() != Local::no) local.follow(operation, torch::jit::last(*stack, schema.returns().size()));
}

TORCH_LIBRARY_IMPL(_, DeferredInit, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&run_touched>());
}

// Scripted programs call `_backward`, which uses no memory of its arguments. The operations inside of it must come
// here one by one.
TORCH_LIBRARY_IMPL(aten, DeferredInit, library) {
  library.impl("_backward", torch::CppFunction::makeFallthrough());
  library.impl("detach", &detach);
}

void add_touch_key(const at::Tensor& tensor) {
  if (!tensor.defined()) {
    throw ValueError("shardwise: an undefined tensor cannot be watched. Give a parameter's tensor.");
  }
  auto& keys = KeySet::of(tensor);
  keys = keys.add(kTouchKey);
}

bool has_touch_key(const at::Tensor& tensor) {
  return tensor.unsafeGetTensorImpl()->key_set().has(kTouchKey);
}

TouchRegistration::TouchRegistration(const at::Tensor& tensor, const std::weak_ptr<TouchListener>& listener) {
  if (!tensor.defined() || !tensor.has_storage()) {
    throw ValueError("shardwise: only a dense tensor can be watched; this one is undefined or has no storage.");
  }
  if (!Listeners::get().add(tensor.storage().unsafeGetStorageImpl(), listener)) {
    throw ValueError(c10::str(
        "shardwise: the memory of a tensor of sizes ", tensor.sizes(),
        " is watched by another listener already. A storage has one listener: destroy its registrations before making "
        "another's."));
  }
  storage_ = tensor.storage().getWeakStorageImpl();
}

TouchRegistration::~TouchRegistration() {
  if (auto* storage = storage_._unsafe_get_target()) Listeners::get().remove(storage);
}

} // namespace shardwise::nn
