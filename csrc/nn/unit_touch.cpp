#include "nn/unit_touch.h"

#include "nn/unit_hooks.h"

#include <shardwise/error.h>

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/util/StringUtil.h>

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
    owner->enter(touch.again ? engine::Keep::all : engine::Keep::outer);
  }
  std::weak_ptr<engine::Unit> unit;
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

void UnitTouch::bind(const std::shared_ptr<engine::Unit>& unit) {
  full_->unit = unit;
  shard_->unit = unit;
}

void UnitTouch::mark(const at::Tensor& tensor) {
  if (front_parts().touch) add_touch_key(tensor);
}

std::shared_ptr<void> UnitTouch::watch(const at::Tensor& tensor, Role role) {
  if (role == Role::full) return std::make_shared<TouchRegistration>(tensor, full_);
  return std::make_shared<TouchRegistration>(tensor, shard_);
}

} // namespace shardwise::nn
