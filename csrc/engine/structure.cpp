#include "engine/structure.h"

#include "base/fingerprint.h"
#include "base/on_host.h"
#include "comm/mesh/messages.h"

#include <shardwise/error.h>

#include <ATen/ops/tensor.h>
#include <c10/util/StringUtil.h>

#include <sstream>

namespace shardwise::engine {
namespace {

/// A word is a length in 32 bits, then Sighting::shared from bit kShared on, and Sighting::unheld at bit kUnheld.
constexpr unsigned kShared = 32;
constexpr unsigned kUnheld = 62;
constexpr auto kWhat = "the comparison of the wrapped modules";

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
      ". Every rank must build the same model, and wrap the same modules in the same order."));
}

} // namespace

std::vector<Sighting> compare_structure(
    const std::vector<std::string>& lines, const Sighting& seen, const std::vector<comm::Collectives>& axes,
    int64_t rank, at::Device device, Counters& counters) {
  std::string text;
  for (const auto& line : lines) text += line + "\n";
  // What was seen travels in the bits that the length leaves free.
  const auto rest = uint64_t{text.size()} | static_cast<uint64_t>(seen.shared + 1) << kShared |
                    (seen.unheld ? uint64_t{1} << kUnheld : 0);
  const auto head =
      at::tensor({static_cast<int64_t>(base::fingerprint(text)), static_cast<int64_t>(rest)}, base::on_host(at::kLong));
  const auto rows = comm::gather_rows(head, axes, device, kWhat, counters);
  std::vector<Sighting> all;
  bool same = true;
  const auto* heads = rows.const_data_ptr<int64_t>();
  for (int64_t i = 0; i < 2 * rows.size(0); i += 2) {
    const auto seen_there = static_cast<uint64_t>(heads[i + 1]);
    same = same && heads[i] == heads[0] && static_cast<uint32_t>(seen_there) == static_cast<uint32_t>(rest);
    const auto shared = (seen_there >> kShared) % (uint64_t{1} << (kUnheld - kShared));
    all.push_back({.shared = static_cast<int64_t>(shared) - 1, .unheld = seen_there >> kUnheld != 0});
  }
  if (same) return all;
  const auto texts = comm::gather_texts(text, axes, device, kWhat, counters);
  for (size_t i = 1; i < texts.size(); ++i) {
    if (texts[i] != texts[0]) report(split(texts[0]), split(texts[i]), i, rank);
  }
  return all;
}

std::vector<bool> any_of_ranks(
    const std::vector<bool>& mine, const std::vector<comm::Collectives>& axes, at::Device device, Counters& counters) {
  const std::vector<int64_t> numbers(mine.begin(), mine.end());
  const auto rows = comm::gather_rows(at::tensor(numbers, base::on_host(at::kLong)), axes, device, kWhat, counters);
  std::vector<bool> any(mine.size(), false);
  for (int64_t rank = 0; rank < rows.size(0); ++rank) {
    const auto row = rows[rank];
    for (size_t i = 0; i < any.size(); ++i) any[i] = any[i] || row.const_data_ptr<int64_t>()[i] != 0;
  }
  return any;
}

} // namespace shardwise::engine
