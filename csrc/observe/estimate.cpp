#include <shardwise/estimate.h>

#include "files/json.h"
#include "observe/text.h"

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
  observe::Bars bars("of a rank", "MB");
  for (const auto& entry : kEntries) {
    const auto bytes = this->*entry.bytes;
    bars.add(entry.title, observe::megabytes(bytes), static_cast<double>(bytes));
  }
  return bars.text();
}

std::string MemoryEstimate::json() const {
  files::Json::Object object;
  for (const auto& entry : kEntries) object.emplace_back(entry.key, this->*entry.bytes);
  return files::json_text(object);
}

std::string TimeEstimate::table() const {
  observe::Bars bars("of a step", "ms");
  const auto add = [&](const char* title, double seconds) {
    bars.add(title, observe::two_places(1e3 * seconds), seconds);
  };
  add("computes", compute);
  add("on the wire", wire);
  add("waits for it", step - compute);
  add("step", step);
  return bars.text();
}

std::string TimeEstimate::json() const {
  return files::json_text(files::Json::Object{{"compute", compute}, {"wire", wire}, {"step", step}});
}

} // namespace shardwise
