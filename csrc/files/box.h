#pragma once

#include <shardwise/detail/export.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

namespace shardwise::files {

using Sizes = std::vector<int64_t>;

/// The product of these sizes, none of them negative; nothing if it is larger than an int64_t.
SHARDWISE_API std::optional<int64_t> product_of(const Sizes& sizes);

/// Sizes or offsets as torch writes them: [2, 3].
SHARDWISE_API std::string text_of(const Sizes& sizes);

/// A rectangular piece of a tensor: where it begins in the whole tensor, and its sizes. Both have one entry for each
/// dimension; a tensor without dimensions has one element, which every box of it holds.
struct SHARDWISE_API Box {
  Sizes offsets;
  Sizes sizes;

  /// The box that is all of a tensor of these sizes.
  static Box whole(const Sizes& sizes);

  int64_t numel() const;
  bool holds(const Box& other) const;
  bool operator==(const Box&) const = default;
};

/// For example: [2, 3] at [0, 4].
SHARDWISE_API std::string text_of(const Box& box);

/// The elements in both boxes; nothing if there are none. Both are of one tensor.
SHARDWISE_API std::optional<Box> intersection(const Box& one, const Box& other);

/// Bytes that follow each other in both memories.
struct Run {
  int64_t from;
  int64_t to;
  int64_t bytes;
};

/// How `piece` is copied from the memory of the box `from` to that of the box `to`, which both hold it; each memory is
/// row-major and has its box alone. Runs are as long as possible, and come in the order of the memories.
SHARDWISE_API void for_each_run(
    const Box& piece, const Box& from, const Box& to, int64_t item_bytes, const std::function<void(const Run&)>& tell);

/// What is wrong if these boxes do not have every element of a tensor exactly once; "" if they do. Empty boxes inside
/// of it do not count.
SHARDWISE_API std::string cover_error(const Sizes& whole, const std::vector<Box>& boxes);

/// The boxes that together hold `count` elements of a tensor from the first one on, as they lie in row-major order:
/// at most 2 * dimensions - 1, in that order.
/// Raises ValueError if the tensor has no such range.
SHARDWISE_API std::vector<Box> boxes_of_range(const Sizes& sizes, int64_t first, int64_t count);

} // namespace shardwise::files
