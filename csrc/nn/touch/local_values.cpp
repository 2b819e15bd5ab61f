#include "nn/touch/local_values.h"

#include "base/weak_table.h"
#include "nn/touch/shard_errors.h"

#include <ATen/core/dispatch/Dispatcher.h>

#include <algorithm>
#include <mutex>
#include <string>
#include <unordered_map>

namespace shardwise::nn {
namespace {

/// The memory of such values. What is done with them is for others to refuse, who ask local(); only a value that leaves
/// is noticed here.
class Followed : public TouchListener {
 public:
  static const std::shared_ptr<Followed>& get() {
    static const auto* followed = new std::shared_ptr<Followed>(std::make_shared<Followed>());
    return *followed;
  }

  void touched(const Touch& touch) override {
    if (touch.operation.operator_name().name == "aten::item") warn_of_local_number();
  }

  std::string explain(const Touch& touch) const override {
    return explain_local_result(touch.operation.operator_name().name);
  }

  Local local(const at::Tensor& tensor) const override {
    const std::lock_guard lock(mutex_);
    const auto entry = entries_.find(tensor.storage().unsafeGetStorageImpl());
    return entry == entries_.end() ? Local::no : entry->second.local;
  }

  void add(const at::Tensor& tensor, Local local) {
    const std::lock_guard lock(mutex_);
    auto* storage = tensor.storage().unsafeGetStorageImpl();
    const auto known = entries_.find(storage);
    if (known != entries_.end()) {
      known->second.local = std::max(known->second.local, local);
    } else if (!is_watched(tensor)) {
      sweep_(entries_, [](const auto& entry) { return entry.second.registration.expired(); });
      entries_.try_emplace(storage, Entry{local, TouchRegistration(tensor, get())});
    } else {
      return;
    }
    add_touch_key(tensor);
  }

  void forget(const at::Tensor& tensor) {
    const std::lock_guard lock(mutex_);
    entries_.erase(tensor.storage().unsafeGetStorageImpl());
  }

 private:
  struct Entry {
    Local local;
    TouchRegistration registration;
  };
  mutable std::mutex mutex_;
  std::unordered_map<const c10::StorageImpl*, Entry> entries_;
  base::Sweep sweep_;
};

/// Besides single numbers, only results of these are followed from a piece: what is computed element by element is
/// right on each rank.
bool gathers(const c10::OperatorHandle& operation) {
  const auto& name = operation.operator_name().name;
  return name == "aten::cat" || name == "aten::abs";
}

} // namespace

void follow_local(const c10::OperatorHandle& operation, Local local, c10::ArrayRef<c10::IValue> results) {
  if (local != Local::number && operation.schema().is_mutable()) return;
  for_each_tensor_among(results, [&](size_t, const at::Tensor& result) {
    if (!result.defined() || !result.has_storage() || !result.is_floating_point()) return;
    const bool is_number = local == Local::number || result.dim() == 0;
    if (is_number || local == Local::values || gathers(operation)) {
      Followed::get()->add(result, is_number ? Local::number : Local::values);
    }
  });
}

void forget_local(c10::ArrayRef<c10::IValue> arguments) {
  for_each_tensor_among(arguments, [](size_t, const at::Tensor& tensor) {
    if (tensor.defined() && tensor.has_storage() && has_touch_key(tensor)) Followed::get()->forget(tensor);
  });
}

} // namespace shardwise::nn
