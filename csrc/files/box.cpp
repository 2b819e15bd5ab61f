#include "files/box.h"

#include <shardwise/error.h>

#include <c10/util/StringUtil.h>

#include <algorithm>

namespace shardwise::files {
namespace {

/// How many elements lie between neighbours along each dimension.
Sizes strides_of(const Sizes& sizes) {
  Sizes strides(sizes.size(), 1);
  for (size_t dim = sizes.size(); dim-- > 1;) strides[dim - 1] = strides[dim] * sizes[dim];
  return strides;
}

/// How many of the last dimensions both boxes have in full, so that a piece runs through them without a break.
size_t dims_in_full(const Box& piece, const Box& from, const Box& to) {
  size_t count = 0;
  for (size_t dim = piece.sizes.size(); dim-- > 0; ++count) {
    if (piece.sizes[dim] != from.sizes[dim] || piece.sizes[dim] != to.sizes[dim]) break;
  }
  return count;
}

int64_t position_in(const Box& box, const Sizes& strides, const Sizes& element) {
  int64_t position = 0;
  for (size_t dim = 0; dim < element.size(); ++dim) position += (element[dim] - box.offsets[dim]) * strides[dim];
  return position;
}

/// Goes to the next element that differs in the dimensions before `dims`; false after the last one.
bool advance(Sizes& element, const Box& box, size_t dims) {
  for (size_t dim = dims; dim-- > 0;) {
    if (++element[dim] < box.offsets[dim] + box.sizes[dim]) return true;
    element[dim] = box.offsets[dim];
  }
  return false;
}

/// The part of `boxes_of_range` below the dimensions that are fixed already.
void add_range(const Sizes& sizes, const Sizes& fixed, int64_t first, int64_t count, std::vector<Box>& result) {
  if (count == 0) return;
  const auto dim = fixed.size();
  const auto add = [&](int64_t begin, int64_t length) {
    auto box = Box::whole(sizes);
    std::copy(fixed.begin(), fixed.end(), box.offsets.begin());
    std::fill_n(box.sizes.begin(), dim, 1);
    if (dim < sizes.size()) {
      box.offsets[dim] = begin;
      box.sizes[dim] = length;
    }
    result.push_back(std::move(box));
  };
  if (dim == sizes.size()) return add(0, 1);
  const auto row = strides_of(sizes)[dim];
  const auto into = [&](int64_t index, int64_t from, int64_t length) {
    auto deeper = fixed;
    deeper.push_back(index);
    add_range(sizes, deeper, from, length, result);
  };
  const auto end = first + count;
  const auto begin_row = (first + row - 1) / row;
  const auto end_row = end / row;
  if (begin_row > end_row) return into(first / row, first % row, count);
  if (first % row != 0) into(first / row, first % row, row - first % row);
  if (begin_row < end_row) add(begin_row, end_row - begin_row);
  into(end_row, 0, end % row);
}

} // namespace

std::optional<int64_t> product_of(const Sizes& sizes) {
  int64_t product = 1;
  for (const auto size : sizes) {
    if (__builtin_mul_overflow(product, size, &product)) return {};
  }
  return product;
}

std::string text_of(const Sizes& sizes) {
  return c10::str("[", c10::Join(", ", sizes), "]");
}

std::string text_of(const Box& box) {
  return c10::str(text_of(box.sizes), " at ", text_of(box.offsets));
}

Box Box::whole(const Sizes& sizes) {
  return {.offsets = Sizes(sizes.size(), 0), .sizes = sizes};
}

int64_t Box::numel() const {
  return *product_of(sizes);
}

bool Box::holds(const Box& other) const {
  if (other.sizes.size() != sizes.size()) return false;
  for (size_t dim = 0; dim < sizes.size(); ++dim) {
    if (other.offsets[dim] < offsets[dim]) return false;
    if (other.offsets[dim] + other.sizes[dim] > offsets[dim] + sizes[dim]) return false;
  }
  return true;
}

std::optional<Box> intersection(const Box& one, const Box& other) {
  Box both = one;
  for (size_t dim = 0; dim < one.sizes.size(); ++dim) {
    const auto begin = std::max(one.offsets[dim], other.offsets[dim]);
    const auto end = std::min(one.offsets[dim] + one.sizes[dim], other.offsets[dim] + other.sizes[dim]);
    if (begin >= end) return {};
    both.offsets[dim] = begin;
    both.sizes[dim] = end - begin;
  }
  return both;
}

void for_each_run(
    const Box& piece, const Box& from, const Box& to, int64_t item_bytes, const std::function<void(const Run&)>& tell) {
  if (piece.numel() == 0) return;
  const auto from_strides = strides_of(from.sizes);
  const auto to_strides = strides_of(to.sizes);
  const auto dims = piece.sizes.size();
  // The dimensions in full and the one before them are one run.
  const auto outer = dims - std::min(dims, dims_in_full(piece, from, to) + 1);
  int64_t bytes = item_bytes;
  for (size_t dim = outer; dim < dims; ++dim) bytes *= piece.sizes[dim];
  auto element = piece.offsets;
  do {
    tell(
        {.from = position_in(from, from_strides, element) * item_bytes,
         .to = position_in(to, to_strides, element) * item_bytes,
         .bytes = bytes});
  } while (advance(element, piece, outer));
}

std::vector<Box> boxes_of_range(const Sizes& sizes, int64_t first, int64_t count) {
  const auto numel = product_of(sizes);
  if (!numel || first < 0 || count < 0 || first > *numel || count > *numel - first) {
    throw ValueError(c10::str(
        "shardwise: a tensor of sizes ", text_of(sizes), " has no range of ", count, " elements from element ", first,
        " on; a range must lie inside the tensor."));
  }
  std::vector<Box> result;
  add_range(sizes, {}, first, count, result);
  return result;
}

} // namespace shardwise::files
