#include "nn/touch/local_values.h"

#include "base/weak_table.h"
#include "nn/touch/mixing.h"
#include "nn/touch/pieces.h"
#include "nn/touch/shard_errors.h"

#include <ATen/core/dispatch/Dispatcher.h>

#include <algorithm>
#include <mutex>
#include <string>
#include <unordered_map>

namespace shardwise::nn {
namespace {

/// The memory of such values. What is done with them is for others to refuse, who ask origin(); only a value that
/// leaves, and a penalty that is no sum, are noticed here.
class Followed : public TouchListener {
 public:
  static const std::shared_ptr<Followed>& get() {
    static const auto* followed = new std::shared_ptr<Followed>(std::make_shared<Followed>());
    return *followed;
  }

  bool touched(const Touch& touch) override {
    const auto [local, cut] = origin(touch.tensor);
    if (touch.operation.operator_name().name == "aten::item" && local != Local::sum) warn_of_local_number();
    refuse_penalty_of_values(touch, local, cut);
    return false;
  }

  std::string explain(const Touch& touch) const override {
    return explain_local_result(touch.operation.operator_name().name);
  }

  Origin origin(const at::Tensor& tensor) const override {
    const std::lock_guard lock(mutex_);
    const auto entry = entries_.find(tensor.storage().unsafeGetStorageImpl());
    if (entry == entries_.end()) return {};
    const auto& [local, cut, registration] = entry->second;
    if (!cut) return {local, std::nullopt};
    return {cut->has_all_rows(tensor) ? local : Local::mixed, cut->dimension_in(tensor)};
  }

  void add(const at::Tensor& tensor, Local local, std::optional<Cut> cut) {
    const std::lock_guard lock(mutex_);
    auto* storage = tensor.storage().unsafeGetStorageImpl();
    const auto known = entries_.find(storage);
    if (known != entries_.end()) {
      known->second.local = std::max(known->second.local, local);
    } else if (!is_watched(tensor)) {
      sweep_(entries_, [](const auto& entry) { return entry.second.registration.expired(); });
      entries_.try_emplace(storage, Entry{local, cut, TouchRegistration(tensor, get())});
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
    std::optional<Cut> cut;
    TouchRegistration registration;
  };
  mutable std::mutex mutex_;
  std::unordered_map<const c10::StorageImpl*, Entry> entries_;
  base::Sweep sweep_;
};

/// Whether its results have the sizes of its argument, and nothing of its values.
bool fills_anew(const c10::OperatorHandle& operation) {
  const auto& name = operation.operator_name().name;
  return name.ends_with("_like") || name.starts_with("aten::new_");
}

} // namespace

void LocalValues::add(
    const c10::OperatorHandle& operation, c10::ArrayRef<c10::IValue> arguments, const Origin& origin,
    const at::Tensor& tensor) {
  if (origin.local == Local::no) return;
  highest_ = std::max(highest_, origin.local);
  if (operation.schema().is_mutable()) return;
  mixes_ = mixes_ || mixes_places(operation, arguments, tensor, origin.cut);
  for_each_tensor_among(arguments, [&](size_t, const at::Tensor& argument) {
    others_train_ = others_train_ || (is_followed_by_autograd(argument) && !has_touch_key(argument));
  });
  if (!origin.cut) return;
  size_ = tensor.size(*origin.cut);
  from_last_ = tensor.dim() - *origin.cut;
}

void LocalValues::follow(const c10::OperatorHandle& operation, c10::ArrayRef<c10::IValue> results) const {
  if (highest_ != Local::mixed && (operation.schema().is_mutable() || fills_anew(operation))) return;
  for_each_tensor_among(results, [&](size_t, const at::Tensor& result) {
    if (!result.defined() || !result.has_storage()) return;
    const auto local = local_of(result);
    if (local == Local::no) return;
    const auto dimension = result.dim() - from_last_;
    const bool is_cut = size_ && dimension >= 0 && result.size(dimension) == *size_;
    Followed::get()->add(
        result, local, is_cut ? std::optional(Cut(*result.unsafeGetTensorImpl(), dimension)) : std::nullopt);
  });
}

Local LocalValues::local_of(const at::Tensor& result) const {
  if (highest_ == Local::mixed) return Local::mixed;
  if (!is_followed_by_autograd(result)) {
    return highest_ == Local::sum || mixes_ || result.dim() == 0 ? Local::mixed : Local::values;
  }
  if (highest_ == Local::sum) return others_train_ ? Local::no : Local::sum;
  return result.dim() == 0 ? Local::sum : Local::values;
}

void LocalValues::forget(c10::ArrayRef<c10::IValue> arguments) {
  for_each_tensor_among(arguments, [](size_t, const at::Tensor& tensor) {
    if (tensor.defined() && tensor.has_storage() && has_touch_key(tensor)) forget(tensor);
  });
  highest_ = Local::no;
}

void LocalValues::forget(const at::Tensor& tensor) {
  Followed::get()->forget(tensor);
}

} // namespace shardwise::nn
