#include "engine/structure.h"

#include <shardwise/error.h>

#include <ATen/ops/empty.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <c10/util/StringUtil.h>

#include <cstring>
#include <sstream>

namespace shardwise::engine {
namespace {

constexpr auto kWhat = "the comparison of the wrapped modules";

// FNV-1a: the same on every machine, unlike std::hash.
int64_t fingerprint(const std::string& text) {
  uint64_t hash = 14695981039346656037ULL;
  for (const unsigned char c : text) hash = (hash ^ c) * 1099511628211ULL;
  return static_cast<int64_t>(hash);
}

at::Tensor gather(const at::Tensor& mine, const comm::Collectives& collectives, at::Device device, Counters& counters) {
  const auto input = mine.to(device);
  auto output = at::empty({collectives.size(), mine.numel()}, input.options());
  collectives.all_gather(output, input, kWhat, counters).wait();
  return output.cpu();
}

std::vector<std::string> split(const std::string& text) {
  std::vector<std::string> lines;
  std::istringstream stream(text);
  for (std::string line; std::getline(stream, line);) lines.push_back(line);
  return lines;
}

[[noreturn]] void report(
    const std::vector<std::string>& first, const std::vector<std::string>& other, int64_t rank, int mine) {
  size_t i = 0;
  while (i < first.size() && i < other.size() && first[i] == other[i]) ++i;
  const auto line = [&](const auto& lines) { return i < lines.size() ? lines[i] : std::string("nothing"); };
  throw Error(c10::str(
      "shardwise: rank ", mine, ": the ranks wrap different modules. Parameter ", i, " of this unit is ", line(first),
      " on rank 0, but ", line(other), " on rank ", rank,
      ". Every rank must wrap the same modules in the same order: build the model alike on all of them."));
}

} // namespace

void compare_structure(
    const std::vector<std::string>& lines, const comm::Collectives& collectives, at::Device device,
    Counters& counters) {
  std::string text;
  for (const auto& line : lines) text += line + "\n";
  const auto length = static_cast<int64_t>(text.size());
  const auto heads = gather(at::tensor({fingerprint(text), length}, at::kLong), collectives, device, counters);
  const auto* head = heads.data_ptr<int64_t>();
  bool same = true;
  int64_t longest = 0;
  for (int64_t rank = 0; rank < collectives.size(); ++rank) {
    same = same && head[2 * rank] == head[0] && head[2 * rank + 1] == head[1];
    longest = std::max(longest, head[2 * rank + 1]);
  }
  if (same) return;
  auto bytes = at::zeros({longest}, at::kByte);
  std::memcpy(bytes.data_ptr(), text.data(), text.size());
  const auto texts = gather(bytes, collectives, device, counters);
  const auto of_rank = [&](int64_t rank) {
    return std::string(static_cast<const char*>(texts[rank].data_ptr()), head[2 * rank + 1]);
  };
  const auto first = of_rank(0);
  for (int64_t rank = 1; rank < collectives.size(); ++rank) {
    const auto other = of_rank(rank);
    if (other != first) report(split(first), split(other), rank, collectives.rank());
  }
}

} // namespace shardwise::engine
