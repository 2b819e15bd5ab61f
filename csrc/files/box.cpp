#include "files/box.h"

#include <shardwise/error.h>

#include <c10/util/StringUtil.h>
#include <c10/util/strides.h>

#include <algorithm>

namespace shardwise::files {
namespace {

/// How many of the last dimensions both boxes have in full, so that a piece runs through them without a break.
size_t dims_in_full(const Box& piece, const Box& from, const Box& to) {
  size_t count = 0;
  for (size_t dim = piece.sizes.size(); dim-- > 0; ++count) {
    if (piece.sizes[dim] != from.sizes[dim] || piece.sizes[dim] != to.sizes[dim]) break;
  }
  return count;
}

int64_t position_in(const Box& box, c10::IntArrayRef strides, const Sizes& element) {
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
  const auto row = c10::contiguous_strides(sizes)[dim];
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

using Chosen = std::vector<const Box*>;

/// Two of these boxes that have an element in common, if there are any: a sweep along the first dimension.
std::optional<Box> first_overlap(Chosen boxes) {
  const auto begin_of = [](const Box* box) { return box->sizes.empty() ? 0 : box->offsets[0]; };
  std::sort(boxes.begin(), boxes.end(), [&](auto* one, auto* other) { return begin_of(one) < begin_of(other); });
  Chosen open;
  for (const auto* box : boxes) {
    const auto is_past = [&](const Box* other) {
      return !box->sizes.empty() && other->offsets[0] + other->sizes[0] <= box->offsets[0];
    };
    open.erase(std::remove_if(open.begin(), open.end(), is_past), open.end());
    for (const auto* other : open) {
      if (auto both = intersection(*box, *other)) return both;
    }
    open.push_back(box);
  }
  return {};
}

/// The first element, in row-major order, that none of the boxes holds. They are cut along each dimension into ranges
/// in which the same boxes stay. Only for the text of an error: it may take long.
std::optional<Sizes> first_gap(const Sizes& whole, const Chosen& boxes, const Sizes& fixed) {
  const auto dim = fixed.size();
  if (dim == whole.size()) return boxes.empty() ? std::optional(fixed) : std::nullopt;
  Sizes edges{0};
  for (const auto* box : boxes) {
    edges.push_back(box->offsets[dim]);
    edges.push_back(box->offsets[dim] + box->sizes[dim]);
  }
  std::sort(edges.begin(), edges.end());
  edges.erase(std::unique(edges.begin(), edges.end()), edges.end());
  for (const auto edge : edges) {
    if (edge >= whole[dim]) break;
    Chosen here;
    for (const auto* box : boxes) {
      if (box->offsets[dim] <= edge && edge < box->offsets[dim] + box->sizes[dim]) here.push_back(box);
    }
    auto deeper = fixed;
    deeper.push_back(edge);
    if (auto gap = first_gap(whole, here, deeper)) return gap;
  }
  return {};
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
  const auto from_strides = c10::contiguous_strides(from.sizes);
  const auto to_strides = c10::contiguous_strides(to.sizes);
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

std::string cover_error(const Sizes& whole, const std::vector<Box>& boxes) {
  const auto numel = product_of(whole);
  if (!numel) return c10::str("a tensor of sizes ", text_of(whole), " is larger than any can be");
  const auto all = Box::whole(whole);
  Chosen chosen;
  // As unsigned numbers: what overlaps may be more than there is.
  uint64_t held = 0;
  for (const auto& box : boxes) {
    if (!all.holds(box))
      return c10::str("the piece ", text_of(box), " does not lie in the whole, whose sizes are ", text_of(whole));
    if (box.numel() == 0) continue;
    held += static_cast<uint64_t>(box.numel());
    chosen.push_back(&box);
  }
  if (const auto both = first_overlap(chosen))
    return c10::str("the elements ", text_of(*both), " are there more than once");
  if (held == static_cast<uint64_t>(*numel)) return "";
  return c10::str("the element ", text_of(*first_gap(whole, chosen, {})), " of ", text_of(whole), " is missing");
}

} // namespace shardwise::files
