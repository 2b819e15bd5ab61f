#include "split/split_parameter.h"

#include "base/compute_guard.h"
#include "base/tensor_hooks.h"
#include "base/weak_table.h"

#include <shardwise/error.h>

#include <atomic>
#include <mutex>
#include <shared_mutex>
#include <unordered_map>

namespace shardwise::split {
namespace {

using WeakTensor = c10::weak_intrusive_ptr<at::TensorImpl>;

/// The pieces of this process, and what was made of them. Owns none.
class SplitTable {
 public:
  static SplitTable& get() {
    static auto* table = new SplitTable;
    return *table;
  }

  void add(const at::Tensor& tensor, const SplitView& view, bool is_leaf) {
    const std::unique_lock lock(mutex_);
    sweep_entries_(entries_, [](const auto& entry) { return entry.second.tensor.expired(); });
    entries_.insert_or_assign(
        tensor.unsafeGetTensorImpl(),
        Entry{WeakTensor(tensor.getIntrusivePtr()), view.parameter, view.dim, view.pieces, is_leaf});
    if (is_leaf) others_.clear();
    any_ = true;
  }

  void forget_others() {
    const std::unique_lock lock(mutex_);
    others_.clear();
  }

  bool any() const {
    return any_;
  }

  std::optional<SplitView> find(const at::TensorImpl* tensor, bool only_leaf = false) const {
    const std::shared_lock lock(mutex_);
    const auto entry = entries_.find(tensor);
    if (entry == entries_.end() || (only_leaf && !entry->second.is_leaf)) return std::nullopt;
    return view_of(entry->second);
  }

  /// The leaf that lies in the memory of a tensor that is not in the table.
  std::optional<SplitView> find_in(const at::Tensor& tensor) {
    if (!tensor.has_storage()) return std::nullopt;
    const auto* storage = tensor.storage().unsafeGetStorageImpl();
    {
      const std::shared_lock lock(mutex_);
      const auto other = others_.find(tensor.unsafeGetTensorImpl());
      if (other != others_.end() && other->second.storage == storage) return std::nullopt;
    }
    const std::unique_lock lock(mutex_);
    if (auto view = search(tensor)) return view;
    sweep_others_(others_, [](const auto& other) { return other.second.tensor.expired(); });
    others_.insert_or_assign(tensor.unsafeGetTensorImpl(), Other{WeakTensor(tensor.getIntrusivePtr()), storage});
    return std::nullopt;
  }

 private:
  struct Entry {
    /// Keeps its address from being used again.
    WeakTensor tensor;
    std::weak_ptr<const SplitParameter> parameter;
    int64_t dim;
    layout::AxisPieces pieces;
    bool is_leaf;
  };
  /// A tensor that was looked for in vain, and its memory then.
  struct Other {
    WeakTensor tensor;
    const c10::StorageImpl* storage;
  };

  /// Where several parameters have one storage, a piece without elements begins where the next one does.
  static bool lies_in(const at::Tensor& tensor, const at::TensorImpl& leaf) {
    const auto offset = tensor.storage_offset() - leaf.storage_offset();
    if (leaf.numel() == 0) return offset == 0 && tensor.numel() == 0;
    return offset >= 0 && offset < leaf.numel();
  }

  std::optional<SplitView> search(const at::Tensor& tensor) const {
    for (const auto& [impl, entry] : entries_) {
      const auto leaf = entry.is_leaf ? entry.tensor.lock() : nullptr;
      if (!leaf || !leaf->has_storage()) continue;
      if (leaf->unsafe_storage().unsafeGetStorageImpl() != tensor.storage().unsafeGetStorageImpl()) continue;
      if (!lies_in(tensor, *leaf)) continue;
      auto view = view_of(entry);
      const bool is_same = leaf->sizes() == tensor.sizes() && leaf->strides() == tensor.strides();
      if (!is_same) view.dim = SplitView::kUnknown;
      return view;
    }
    return std::nullopt;
  }

  static SplitView view_of(const Entry& entry) {
    auto parameter = entry.parameter.lock();
    if (!parameter) {
      throw Error(
          "shardwise: a parameter that parallelize() divided lost its hooks, or is gone while a copy of it is used "
          "(the first register_hook() in Python clears hooks). Register hooks before parallelize(), and keep the "
          "module alive.");
    }
    return {std::move(parameter), entry.dim, entry.pieces};
  }

  mutable std::shared_mutex mutex_;
  std::unordered_map<const at::TensorImpl*, Entry> entries_;
  std::unordered_map<const at::TensorImpl*, Other> others_;
  base::Sweep sweep_entries_;
  base::Sweep sweep_others_;
  std::atomic<bool> any_ = false;
};

} // namespace

// This hook only owns.
void add_split(const at::Tensor& leaf, const std::shared_ptr<const SplitParameter>& parameter) {
  base::add_hook(leaf, [parameter](const at::TensorBase&) { return at::TensorBase(); });
  SplitTable::get().add(leaf, {parameter, parameter->dim, parameter->pieces}, true);
}

void add_split_view(const at::Tensor& tensor, const SplitView& view) {
  SplitTable::get().add(tensor, view, false);
}

void split_moved() {
  SplitTable::get().forget_others();
}

bool any_split() {
  return SplitTable::get().any();
}

std::shared_ptr<const SplitParameter> split_parameter_of(const at::Tensor& leaf) {
  if (!any_split()) return nullptr;
  const auto view = SplitTable::get().find(leaf.unsafeGetTensorImpl(), true);
  return view ? view->parameter : nullptr;
}

std::optional<SplitView> find_split(const at::Tensor& tensor) {
  auto& table = SplitTable::get();
  if (!table.any() || !tensor.defined() || !tensor.unsafeGetTensorImpl()->key_set().has(base::kTouchKey))
    return std::nullopt;
  if (auto view = table.find(tensor.unsafeGetTensorImpl())) return view;
  return table.find_in(tensor);
}

} // namespace shardwise::split
