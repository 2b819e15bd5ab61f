#pragma once

#include "layout/shards.h"

#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <vector>

namespace shardwise::group {

/// How a unit's parameters are spread over the ranks.
enum class Layout { replicate, rows, flat };

/// What parameters of a unit that travel together have in common.
struct Kind {
  at::ScalarType dtype;
  at::Device device;
  /// Every rank keeps all of them, even in a sharded unit.
  bool whole;
  /// Each has an Extension.
  bool extended = false;
  /// The dtype of their full copies, where it is not the one that the unit computes in.
  std::optional<at::ScalarType> full_dtype = std::nullopt;
  /// That of their gradients, where it is not their own.
  std::optional<at::ScalarType> grad_dtype = std::nullopt;
  bool operator==(const Kind&) const = default;
};

/// The items, split by their kind; kinds are in the order of their first items.
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

/// The dtypes and the layout of a group of parameters. They follow from the parameters' kind: neither parameters nor
/// group need to exist.
struct Outline {
  /// What all groups of a unit have in common.
  struct Policy {
    Layout layout = Layout::replicate;
    /// The number of shards.
    int64_t world = 1;
    /// The dtypes of full copies and of sums, for floating-point parameters. Unset: that of the parameters, and that of
    /// their gradients.
    std::optional<at::ScalarType> full_dtype;
    std::optional<at::ScalarType> sum_dtype;
  };
  Outline(const Kind& kind, const Policy& policy);

  /// `dims`: the dimension along which each is cut, in the layout `rows`.
  layout::Shards lay_out(const std::vector<std::vector<int64_t>>& shapes, const std::vector<int64_t>& dims) const;
  /// The layout of the gradients of some of the parameters: a rank has the same pieces of them as of the parameters.
  layout::Shards lay_out_some(const layout::Shards& all, const std::vector<size_t>& chosen) const;

  /// That of this group, which may differ from its unit's.
  Layout layout;
  int64_t world;
  /// The dtypes of the parameters, of their full copies, and of sums of their gradients.
  at::ScalarType dtype;
  at::ScalarType full_dtype;
  at::ScalarType sum_dtype;
};

} // namespace shardwise::group
