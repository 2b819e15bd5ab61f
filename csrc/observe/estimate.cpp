#include <shardwise/estimate.h>

#include "observe/text.h"

#include <algorithm>
#include <sstream>

namespace shardwise {

std::string MemoryEstimate::table() const {
  const std::vector<std::pair<std::string, int64_t>> rows{
      {"parameters", parameters},
      {"buffers", buffers},
      {"optimizer", optimizer},
      {"gradients", gradients},
      {"pool", pool},
      {"local gradients", local_gradients},
      {"peak in forward", forward_peak},
      {"peak in backward", backward_peak},
      {"after the step", after_step}};
  std::vector<observe::Row> columns{{"of a rank", "MB"}};
  for (const auto& [name, bytes] : rows) columns.push_back({name, observe::megabytes(bytes)});
  std::istringstream lines(observe::aligned(columns));
  std::string line;
  std::getline(lines, line);
  auto text = line + "\n";
  constexpr int64_t kWidth = 32;
  const auto most = std::max({forward_peak, backward_peak, after_step, int64_t{1}});
  for (const auto& row : rows) {
    std::getline(lines, line);
    const auto bar = std::string(static_cast<size_t>((row.second * kWidth + most / 2) / most), '#');
    text += line;
    if (!bar.empty()) text += "  " + bar;
    text += '\n';
  }
  return text;
}

std::string MemoryEstimate::json() const {
  return observe::Object()
      .number("parameters", parameters)
      .number("buffers", buffers)
      .number("optimizer", optimizer)
      .number("gradients", gradients)
      .number("pool", pool)
      .number("local_gradients", local_gradients)
      .number("forward_peak", forward_peak)
      .number("backward_peak", backward_peak)
      .number("after_step", after_step)
      .str();
}

} // namespace shardwise
