#include "nn/first_rank.h"

#include "base/compute_guard.h"
#include "comm/messages.h"

#include <ATen/ops/empty.h>

namespace shardwise::nn {
namespace {

/// A list of texts as one, and back.
std::string packed(const std::vector<std::string>& texts) {
  std::string all;
  for (const auto& text : texts) all += text + '\0';
  return all;
}

std::vector<std::string> unpacked(const std::string& all) {
  std::vector<std::string> texts;
  for (size_t start = 0; start < all.size();) {
    const auto end = all.find('\0', start);
    texts.push_back(all.substr(start, end - start));
    start = end + 1;
  }
  return texts;
}

} // namespace

void FirstRank::share(std::vector<std::string>& texts, const std::string& what) const {
  if (unit_ == nullptr) return;
  const auto& device = unit_->mesh().device();
  texts =
      unpacked(comm::gather_texts(packed(texts), unit_->ranks().axes(), device, what, unit_->own_counters()).front());
}

// Sent as bytes, which every back end can do whatever the dtype.
at::Tensor FirstRank::share(
    const at::Tensor& value, at::IntArrayRef sizes, const at::TensorOptions& options, const std::string& what,
    Counters* counters) const {
  if (unit_ == nullptr) return value;
  const base::ComputeGuard guard;
  const auto there = options.device(unit_->mesh().device());
  const auto whole = is_here() ? value.to(there).contiguous() : at::empty(sizes, there);
  if (whole.numel() == 0) return whole;
  unit_->ranks().spread(
      whole.view({-1}).view(at::kByte), what, counters == nullptr ? unit_->own_counters() : *counters);
  return whole;
}

} // namespace shardwise::nn
