#pragma once

#include "layout/shards.h"

#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <vector>

namespace shardwise::group {

/// How the parameters of a unit lie on the ranks.
enum class Layout { replicate, rows, flat };

/// What parameters of a unit that travel together have in common.
struct Kind {
  at::ScalarType dtype;
  at::Device device;
  /// Every rank keeps all of them, in a sharded unit too.
  bool whole;
  /// Each travels in a way of its own.
  bool extended = false;
  bool operator==(const Kind&) const = default;
};

/// The items of each kind, in the order of the first of each.
template <typename Item, typename KindOf>
std::vector<std::vector<Item>> by_kind(const std::vector<Item>& items, const KindOf& kind_of) {
  std::vector<std::vector<Item>> parts;
  for (const auto& item : items) {
    const auto same = [&](const auto& part) { return kind_of(part.front()) == kind_of(item); };
    const auto part = std::find_if(parts.begin(), parts.end(), same);
    part == parts.end() ? parts.push_back({item}) : part->push_back(item);
  }
  return parts;
}

/// Dtypes and places of a group of parameters, which follow from what they are alone: neither they nor the group need
/// be there.
class Outline {
 public:
  /// What all groups of a unit have in common.
  struct Policy {
    Layout layout = Layout::replicate;
    /// The number of shards.
    int64_t world = 1;
    /// Of full copies and of sums, where those are floating-point numbers; unset: of the parameters, of the full
    /// copies.
    std::optional<at::ScalarType> full_dtype;
    std::optional<at::ScalarType> sum_dtype;
  };
  Outline(const Kind& kind, const Policy& policy);

  /// Of this group, not of its unit.
  Layout layout() const {
    return layout_;
  }
  int64_t world() const {
    return world_;
  }
  /// Of the parameters, of their full copies, and of sums of their gradients.
  at::ScalarType dtype() const {
    return dtype_;
  }
  at::ScalarType full_dtype() const {
    return full_dtype_;
  }
  at::ScalarType sum_dtype() const {
    return sum_dtype_;
  }
  /// `dims`: along which each is cut, in the layout `rows`.
  layout::Shards lay_out(const std::vector<std::vector<int64_t>>& shapes, const std::vector<int64_t>& dims) const;
  /// Of the gradients of some of them: each is the same piece as the shard.
  layout::Shards lay_out_some(const layout::Shards& all, const std::vector<size_t>& chosen) const;

 private:
  int64_t alignment() const;

  Layout layout_;
  int64_t world_;
  at::ScalarType dtype_;
  at::ScalarType full_dtype_;
  at::ScalarType sum_dtype_;
};

} // namespace shardwise::group
