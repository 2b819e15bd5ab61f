#include "files/box.h"

#include <c10/util/StringUtil.h>

#include <algorithm>

namespace shardwise::files {
namespace {

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
