#pragma once

#include "base/caller.h"
#include "base/compute_guard.h"

#include <shardwise/detail/export.h>

#include <ATen/core/Tensor.h>
#include <ATen/core/stack.h>
#include <c10/util/SmallVector.h>

#include <memory>
#include <optional>
#include <string>
#include <utility>

namespace c10 {
class OperatorHandle;
}

namespace shardwise::nn {

// The touch trigger: the owner of parameters whose memory comes and goes gets a call before each operation that uses
// one, in forward and in backward, whatever calls it, without a change to the model.
//
// A leaf carries one more dispatch key. The only fallback of that key calls the listener of the leaf's storage, then
// runs the operation. Views, detach(), .data() and what autograd saves carry the key too, so the trigger notices the
// first use in backward like the first in forward. Results do not carry it; operations without a keyed argument cost
// nothing. Frequent operations have a shortcut (unboxed.cpp).
//
// The trigger does not notice:
// - data_ptr(), accessors and storage() outside of an operation: a freed leaf gives a null pointer there;
// - sizes, strides, dtype, requires_grad, hooks and .data(): they use no memory, so this is as it should be;
// - a view or a saved variable that was made before the key was put on;
// - what runs inside an operation that has keyed arguments: these are announced at its start, and nothing else is.
//   A custom operator that runs modules or a backward of its own inside must not take keyed arguments;
// - tensors in arguments other than Tensor, Tensor[], Tensor?[] and their optional forms.
//
// If a thread includes the key in its own set, all its operations come here: on_meta() of <shardwise/meta.h> does so.
//
// The key is DeferredInit, which torch keeps for others and registers nothing for. A process can have one fallback for
// it: a library that registers its own cannot be loaded beside this one.
using base::kTouchKey;

/// Puts the key on a tensor. Do it last: set_data(), and so Module::to(), replaces the tensor's keys by those of the
/// new data. If a tensor that had the key has lost it, its data was replaced. As with any change of a tensor, not while
/// another thread uses it. Raises ValueError for an undefined tensor.
SHARDWISE_API void add_touch_key(const at::Tensor& tensor);
SHARDWISE_API bool has_touch_key(const at::Tensor& tensor);

/// How a tensor depends on this rank's shards, or their gradients, alone. `piece`: it is one. `values`: it was computed
/// element by element. `sum`: autograd follows it, as a penalty in the loss. `mixed`: it was computed from several
/// elements, such as a norm, or is some rows; from those of all ranks it would be another (nn/touch/local_values.h).
enum class Local : uint8_t { no, piece, values, sum, mixed };

/// Where a tensor comes from: with `local`, the dimension along which other ranks have the rest of it, where it is one.
struct Origin {
  Local local = Local::no;
  std::optional<int64_t> cut;
};

/// One argument of an operation that is about to run.
struct Touch {
  const c10::OperatorHandle& operation;
  /// All arguments of the operation; none if it only reads and the listener does not need them.
  c10::ArrayRef<c10::IValue> arguments;
  /// The argument itself: a leaf, or a view of one.
  const at::Tensor& tensor;
  /// Whether the operation writes to it, in place or as an output.
  bool written;
  /// The highest Local among the arguments.
  Local local = Local::no;
  /// The listeners of this operation freed memory for one another, and are called once more: now none may free any.
  bool again = false;
};

/// Gets a call for every keyed argument in the storage that it watches, before the operation runs.
class SHARDWISE_API TouchListener {
 public:
  virtual ~TouchListener() = default;

  /// Runs on the thread of the operation, in the caller's modes (grad mode, inference mode, autocast), except that
  /// nothing it does is a touch. Ranks that are threads may be here at the same time. No lock is held.
  ///
  /// When it returns, the memory of the tensor must be there. If a later listener frees it, all are called once more,
  /// and may not free any. Whatever it throws reaches the caller of the operation or of backward(), and the
  /// operation does not run. Returns whether ended() is to be called.
  virtual bool touched(const Touch& touch) = 0;
  /// Whether touched() has to know the arguments of an operation that only reads.
  virtual bool needs_arguments() const {
    return true;
  }
  /// The operation is over, for each touched() that asked for it. Also when the operation failed.
  virtual void ended() noexcept {}
  virtual Origin origin(const at::Tensor& /*tensor*/) const {
    return {};
  }
  /// Whether detach() needs no call of touched(): the memory is there, and what is detached has the same origin.
  virtual bool may_detach() const {
    return false;
  }
  /// Why torch refused the operation, if the listener knows better than torch; else empty.
  virtual std::string explain(const Touch& /*touch*/) const {
    return {};
  }
  /// The same without the arguments, some of which torch may have moved away.
  virtual std::string advice(const c10::OperatorHandle& /*operation*/) const {
    return {};
  }
  /// The dtype to which the other floating-point arguments of an operation with this listener's tensors are cast. Asked
  /// after touched().
  virtual std::optional<at::ScalarType> wanted_dtype() const {
    return std::nullopt;
  }
  /// Whether this argument is exempt from that cast.
  virtual bool is_exempt_from_cast(const at::Tensor& /*argument*/) const {
    return false;
  }
};

/// Calls listeners of one operation, and those that asked for it once more when it is over.
class Touches {
 public:
  Touches() = default;
  Touches(const Touches&) = delete;
  Touches& operator=(const Touches&) = delete;
  ~Touches() {
    for (const auto& listener : ending_) listener->ended();
  }
  C10_ALWAYS_INLINE void add(std::shared_ptr<TouchListener> listener, const Touch& touch) {
    if (base::called_by_torch([&] { return listener->touched(touch); })) ending_.push_back(std::move(listener));
  }

 private:
  c10::SmallVector<std::shared_ptr<TouchListener>, 4> ending_;
};

/// Calls visit(position, tensor) for the tensors among these values, also for those in lists.
template <typename Visit>
void for_each_tensor_among(c10::ArrayRef<c10::IValue> values, const Visit& visit) {
  for (size_t i = 0; i < values.size(); ++i) {
    if (values[i].isTensor()) {
      visit(i, values[i].toTensor());
    } else if (values[i].isTensorList() || values[i].isOptionalTensorList()) {
      for (const auto& element : values[i].toListRef()) {
        if (element.isTensor()) visit(i, element.toTensor());
      }
    }
  }
}

/// Runs operations on some keyed tensors in another way. There is one for the process, which tensor parallelism sets.
struct Substitute {
  /// Whether this keyed tensor is one of them.
  bool (*concerns)(const at::Tensor& tensor);
  /// Leaves the operation's results on the stack in the place of its arguments, and returns true. Runs after all
  /// listeners, and without any.
  bool (*run)(const c10::OperatorHandle& operation, c10::DispatchKeySet keys, torch::jit::Stack& stack);
};
/// It must live as long as the process.
void set_substitute(const Substitute& substitute);
bool has_substitute(const at::Tensor& tensor);

/// Does what the fallback does, for an operation that has a kernel of its own for the key.
void run_touched(const c10::OperatorHandle& operation, c10::DispatchKeySet keys, torch::jit::Stack* stack);
/// Runs the operation without a call to any listener.
void run_untouched(const c10::OperatorHandle& operation, c10::DispatchKeySet keys, torch::jit::Stack* stack);
/// The living listener that watches the memory of this tensor; null if there is none.
std::shared_ptr<TouchListener> listener_of(const at::Tensor& tensor);
bool is_watched(const at::Tensor& tensor);

/// Ties a listener to the storage of a tensor until this object is destroyed. Thread safe; may be used inside
/// touched().
///
/// Owns neither listener nor memory. A listener that is gone gets no call. Once the registration is gone the listener
/// gets no more calls, but a call that another thread has begun still ends.
///
/// An operation with a keyed argument whose memory is freed, and that no listener refills, raises Error instead.
class SHARDWISE_API TouchRegistration {
 public:
  TouchRegistration() = default;
  /// Raises ValueError for a tensor without a storage, and for a storage that has another listener already.
  TouchRegistration(const at::Tensor& tensor, const std::weak_ptr<TouchListener>& listener);
  TouchRegistration(TouchRegistration&&) noexcept = default;
  TouchRegistration& operator=(TouchRegistration other) noexcept {
    std::swap(storage_, other.storage_);
    return *this;
  }
  ~TouchRegistration();
  /// Whether the memory is gone.
  bool expired() const {
    return storage_.expired();
  }

 private:
  /// Keeps the storage's address from being used again, even when the memory is gone.
  c10::weak_intrusive_ptr<c10::StorageImpl> storage_{c10::intrusive_ptr<c10::StorageImpl>()};
};

} // namespace shardwise::nn
