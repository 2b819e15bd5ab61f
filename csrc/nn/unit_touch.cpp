#include "nn/unit_touch.h"

#include "engine/backward_watch.h"
#include "nn/unit_hooks.h"

#include <shardwise/error.h>

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/GradMode.h>
#include <c10/util/StringUtil.h>

#include <unordered_set>

namespace shardwise::nn {

class UnitTouch::Full : public TouchListener {
 public:
  void touched(const Touch& touch) override {
    const auto owner = unit.lock();
    if (!owner) return;
    if (touch.written) {
      throw Error(c10::str(
          "shardwise: ", touch.operation.operator_name(), " was about to write to the full copy of '",
          owner->parameter_at(touch.tensor),
          "', and the write would be lost: the values of a sharded parameter live in the shards of all ranks. Change "
          "the shards, which are the module's parameters(), or change the parameter before fully_shard()."));
    }
    owner->use(touch.tensor, touch.again ? engine::Keep::all : engine::Keep::outer);
  }

  // The operations of a backward get what those of the forward had, and results of these.
  std::optional<at::ScalarType> wanted_dtype() const override {
    if (!dtype || calls > 0 || (engine::BackwardWatch::running() && !c10::GradMode::is_enabled())) return std::nullopt;
    return dtype;
  }
  bool spares(const at::Tensor& argument) const override {
    return buffers.contains(argument.unsafeGetTensorImpl());
  }

  std::weak_ptr<engine::Unit> unit;
  std::optional<at::ScalarType> dtype;
  std::unordered_set<const at::TensorImpl*> buffers;
  /// That can be seen, and are running.
  int calls = 0;
};

class UnitTouch::Shard : public TouchListener {
 public:
  void touched(const Touch& touch) override {
    if (!touch.written) return;
    if (const auto owner = unit.lock()) owner->shard_written();
  }
  std::weak_ptr<engine::Unit> unit;
};

UnitTouch::UnitTouch() : full_(std::make_shared<Full>()), shard_(std::make_shared<Shard>()) {}

void UnitTouch::bind(const std::shared_ptr<engine::Unit>& unit, const std::vector<engine::NamedTensor>& buffers) {
  full_->unit = unit;
  shard_->unit = unit;
  if (unit->precision().cast_forward_inputs) full_->dtype = unit->precision().param_dtype;
  for (const auto& buffer : buffers) full_->buffers.insert(buffer.tensor.unsafeGetTensorImpl());
}

void UnitTouch::begin_call() {
  ++full_->calls;
}

// A hook of the user's that failed first kept ours from seeing the begin.
void UnitTouch::end_call() {
  full_->calls = std::max(0, full_->calls - 1);
}

void UnitTouch::mark(const at::Tensor& tensor) {
  if (front_parts().touch) add_touch_key(tensor);
}

std::shared_ptr<void> UnitTouch::watch(const at::Tensor& tensor, Role role) {
  if (role == Role::full) return std::make_shared<TouchRegistration>(tensor, full_);
  return std::make_shared<TouchRegistration>(tensor, shard_);
}

} // namespace shardwise::nn
