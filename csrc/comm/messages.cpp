#include "comm/messages.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cstring>

namespace shardwise::comm {

at::Tensor gather_rows(
    const at::Tensor& mine, const Collectives& collectives, at::Device device, const std::string& what,
    Counters& counters) {
  const auto input = mine.to(device);
  auto output = at::empty({collectives.size(), mine.numel()}, input.options());
  collectives.all_gather(output, input, what, counters).wait();
  return output.cpu();
}

std::vector<std::string> gather_texts(
    const std::string& mine, const Collectives& collectives, at::Device device, const std::string& what,
    Counters& counters) {
  if (collectives.size() == 1) return {mine};
  const auto length = at::full({1}, static_cast<int64_t>(mine.size()), at::kLong);
  const auto lengths = gather_rows(length, collectives, device, what, counters);
  const auto* sizes = lengths.data_ptr<int64_t>();
  std::vector<std::string> texts(collectives.size());
  const auto longest = *std::max_element(sizes, sizes + texts.size());
  if (longest == 0) return texts;
  const auto bytes = at::zeros({longest}, at::kByte);
  std::memcpy(bytes.data_ptr(), mine.data(), mine.size());
  const auto rows = gather_rows(bytes, collectives, device, what, counters);
  for (size_t rank = 0; rank < texts.size(); ++rank) {
    texts[rank].assign(static_cast<const char*>(rows.data_ptr()) + rank * longest, sizes[rank]);
  }
  return texts;
}

} // namespace shardwise::comm
