#include "engine/structure.h"

#include "comm/messages.h"

#include <shardwise/error.h>

#include <ATen/ops/tensor.h>
#include <c10/util/StringUtil.h>

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

std::vector<std::string> split(const std::string& text) {
  std::vector<std::string> lines;
  std::istringstream stream(text);
  for (std::string line; std::getline(stream, line);) lines.push_back(line);
  return lines;
}

[[noreturn]] void report(
    const std::vector<std::string>& first, const std::vector<std::string>& other, size_t rank, int64_t mine) {
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
    const std::vector<std::string>& lines, const std::vector<comm::Collectives>& axes, int64_t rank, at::Device device,
    Counters& counters) {
  std::string text;
  for (const auto& line : lines) text += line + "\n";
  const auto length = static_cast<int64_t>(text.size());
  const auto heads =
      comm::gather_rows(at::tensor({fingerprint(text), length}, at::kLong), axes, device, kWhat, counters);
  const auto* head = heads.data_ptr<int64_t>();
  bool same = true;
  for (int64_t i = 0; i < heads.size(0); ++i) same = same && head[2 * i] == head[0] && head[2 * i + 1] == head[1];
  if (same) return;
  const auto texts = comm::gather_texts(text, axes, device, kWhat, counters);
  for (size_t i = 1; i < texts.size(); ++i) {
    if (texts[i] != texts[0]) report(split(texts[0]), split(texts[i]), i, rank);
  }
}

} // namespace shardwise::engine
