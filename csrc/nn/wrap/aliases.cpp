#include "nn/wrap/aliases.h"

#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <map>
#include <unordered_map>

namespace shardwise::nn {
namespace {

/// What is known of those who share a piece of memory.
struct Memory {
  std::vector<engine::NamedTensor*> parameters;
  /// The bases of parameters that are views, and how many handles on each base autograd keeps for those views.
  std::unordered_map<at::TensorImpl*, size_t> bases;
};

void add_bases(const at::Tensor& tensor, Memory& memory) {
  const auto* view = torch::autograd::impl::get_view_autograd_meta(tensor);
  if (view == nullptr) return;
  if (view->has_bw_view()) ++memory.bases[view->get_backward_view().base_.unsafeGetTensorImpl()];
  if (view->has_fw_view() && !view->shared_view_info()) {
    ++memory.bases[view->get_forward_view().base_.unsafeGetTensorImpl()];
  }
}

bool has_strangers(const Memory& memory) {
  const auto known = memory.parameters.size() + memory.bases.size();
  if (memory.parameters.front()->tensor.storage().use_count() > known) return true;
  return std::any_of(memory.bases.begin(), memory.bases.end(), [](const auto& base) {
    return c10::raw::intrusive_ptr::use_count(base.first) > base.second;
  });
}

/// The elements of its storage that a tensor spans: the first, and one past the last.
std::pair<int64_t, int64_t> range_of(const at::Tensor& tensor) {
  auto end = tensor.storage_offset() + (tensor.numel() == 0 ? 0 : 1);
  for (int64_t i = 0; i < tensor.dim() && tensor.numel() > 0; ++i) end += (tensor.size(i) - 1) * tensor.stride(i);
  return {tensor.storage_offset(), end};
}

} // namespace

void find_aliases(std::vector<engine::NamedTensor>& parameters) {
  std::map<const c10::StorageImpl*, Memory> memories;
  for (auto& parameter : parameters) {
    if (!parameter.tensor.has_storage() || engine::Unit::of(parameter.tensor)) continue;
    auto& memory = memories[parameter.tensor.storage().unsafeGetStorageImpl()];
    memory.parameters.push_back(&parameter);
    add_bases(parameter.tensor, memory);
  }
  for (auto& [storage, memory] : memories) {
    const bool strangers = has_strangers(memory);
    for (auto* parameter : memory.parameters) {
      const auto [start, end] = range_of(parameter->tensor);
      const bool overlaps = std::any_of(memory.parameters.begin(), memory.parameters.end(), [&](const auto* other) {
        const auto [first, last] = range_of(other->tensor);
        return other != parameter && first < end && start < last;
      });
      // A parameter that stays whole keeps its memory.
      parameter->shared = !parameter->whole && (strangers || overlaps);
    }
  }
}

} // namespace shardwise::nn
