#pragma once

#include <ATen/record_function.h>

#include <cstdint>
#include <string>

namespace shardwise::observe {

/// A label that profilers show until the end of the scope, worded like those of torch's FSDP2: "WHAT (UNIT)", "WHAT for
/// UNIT" if it is done ahead of time for a unit, or only "WHAT" if the unit has no name. Costs next to nothing without
/// a profiler.
class Label {
 public:
  enum class Of : uint8_t { unit, next };

  Label(const char* what, const std::string& unit, Of of = Of::unit) {
    if (!function_.isActive()) return;
    std::string text = what;
    if (!unit.empty()) text += of == Of::unit ? " (" + unit + ")" : " for " + unit;
    function_.before(text, c10::ArrayRef<const c10::IValue>());
  }

 private:
  at::RecordFunction function_;
};

} // namespace shardwise::observe
