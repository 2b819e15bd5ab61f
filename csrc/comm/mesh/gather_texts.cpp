#include "comm/mesh/gather_texts.h"

#include "base/compute_guard.h"
#include "base/on_host.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cstring>

namespace shardwise::comm {

// Along the last axis first, so that the rows end up in rank order.
at::Tensor gather_rows(
    const at::Tensor& mine, const std::vector<Collectives>& axes, at::Device device, const std::string& what,
    Counters& counters) {
  const base::ComputeGuard guard;
  auto rows = mine.to(device).view({1, -1});
  for (auto axis = axes.rbegin(); axis != axes.rend(); ++axis) {
    if (axis->size() == 1) continue;
    auto output = at::empty({axis->size() * rows.size(0), mine.numel()}, rows.options());
    axis->all_gather(output, rows, what, counters).wait();
    rows = output;
  }
  return rows.cpu();
}

std::vector<std::string> gather_texts(
    const std::string& mine, const std::vector<Collectives>& axes, at::Device device, const std::string& what,
    Counters& counters) {
  const base::ComputeGuard guard;
  const auto length = at::full({1}, static_cast<int64_t>(mine.size()), base::on_host(at::kLong));
  const auto lengths = gather_rows(length, axes, device, what, counters);
  const auto* sizes = lengths.data_ptr<int64_t>();
  std::vector<std::string> texts(lengths.size(0));
  const auto longest = *std::max_element(sizes, sizes + texts.size());
  if (longest == 0) return texts;
  const auto bytes = at::zeros({longest}, base::on_host(at::kByte));
  std::memcpy(bytes.data_ptr(), mine.data(), mine.size());
  const auto rows = gather_rows(bytes, axes, device, what, counters);
  for (size_t rank = 0; rank < texts.size(); ++rank) {
    texts[rank].assign(static_cast<const char*>(rows.data_ptr()) + rank * longest, sizes[rank]);
  }
  return texts;
}

} // namespace shardwise::comm
