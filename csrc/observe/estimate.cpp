#include <shardwise/estimate.h>

#include "observe/text.h"

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
  std::vector<observe::Row> lines{{"of a rank", "MB"}};
  for (const auto& [name, bytes] : rows) lines.push_back({name, observe::megabytes(bytes)});
  return observe::aligned(lines);
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
