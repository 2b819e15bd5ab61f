#pragma once

#include "engine/front_end.h"

#include <ATen/core/Tensor.h>

#include <mutex>
#include <optional>
#include <unordered_map>

namespace shardwise::nn {

/// Where a tensor is cut into the pieces of the ranks: the dimension that has this size and stride. Views keep both.
class Cut {
 public:
  Cut(const c10::TensorImpl& piece, int64_t dimension);
  /// The dimension of a view. None if the view lacks some of it, or has made one dimension of several.
  std::optional<int64_t> dimension_in(const at::Tensor& view) const;
  /// Whether a view has all rows: which rows of the whole some are differs between ranks.
  bool has_all_rows(const at::Tensor& view) const;

 private:
  int64_t size_;
  int64_t stride_;
  int64_t numel_;
};

/// The shards of a unit's parameters, and their gradients, by their memory.
class Pieces {
 public:
  /// The parameter of which this is the shard, its gradient, or a view of one of them.
  const group::Parameter* find(const engine::Unit& unit, const at::Tensor& tensor) const;

 private:
  struct Place {
    const c10::StorageImpl* storage;
    int64_t offset;
    bool operator==(const Place&) const = default;
  };
  struct Hash {
    size_t operator()(const Place& place) const {
      return std::hash<const void*>()(place.storage) ^ std::hash<int64_t>()(place.offset);
    }
  };

  mutable std::mutex mutex_;
  /// Where the parameter was that was found there last. It is asked whether it still is.
  mutable std::unordered_map<Place, size_t, Hash> found_;
};

bool is_piece_of_gradient(const group::Parameter& parameter, const at::Tensor& tensor);

/// The cut of a shard or a gradient, of which this tensor is a view. A flattened shard has one dimension.
Cut cut_of(const group::Parameter& parameter, const at::Tensor& piece);

} // namespace shardwise::nn
