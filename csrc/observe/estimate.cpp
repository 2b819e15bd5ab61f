#include <shardwise/estimate.h>

#include "files/json.h"
#include "observe/text.h"

#include <algorithm>
#include <iterator>

namespace shardwise {

namespace {

/// A number as the table and as JSON has it.
struct Entry {
  const char* title;
  const char* key;
  int64_t MemoryEstimate::*bytes;
};

constexpr Entry kEntries[] = {
    {"parameters", "parameters", &MemoryEstimate::parameters},
    {"buffers", "buffers", &MemoryEstimate::buffers},
    {"optimizer", "optimizer", &MemoryEstimate::optimizer},
    {"gradients", "gradients", &MemoryEstimate::gradients},
    {"pool", "pool", &MemoryEstimate::pool},
    {"unsummed gradients", "unsummed_gradients", &MemoryEstimate::unsummed_gradients},
    {"peak in forward", "forward_peak", &MemoryEstimate::forward_peak},
    {"peak in backward", "backward_peak", &MemoryEstimate::backward_peak},
    {"after the step", "after_step", &MemoryEstimate::after_step}};

} // namespace

std::string MemoryEstimate::table() const {
  std::vector<observe::Row> columns{{"of a rank", "MB"}};
  for (const auto& entry : kEntries) columns.push_back({entry.title, observe::megabytes(this->*entry.bytes)});
  const auto lines = observe::aligned(columns);
  auto text = lines.front() + "\n";
  constexpr int64_t kWidth = 32;
  const auto most = std::max({forward_peak, backward_peak, after_step, int64_t{1}});
  for (size_t i = 0; i < std::size(kEntries); ++i) {
    const auto bar = std::string(static_cast<size_t>((this->*kEntries[i].bytes * kWidth + most / 2) / most), '#');
    text += lines[i + 1] + (bar.empty() ? "" : "  " + bar) + "\n";
  }
  return text;
}

std::string MemoryEstimate::json() const {
  files::Json::Object object;
  for (const auto& entry : kEntries) object.emplace_back(entry.key, this->*entry.bytes);
  return files::json_text(object);
}

} // namespace shardwise
