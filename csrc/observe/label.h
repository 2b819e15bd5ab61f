#pragma once

#include <ATen/record_function.h>

#include <cstdint>
#include <string>

namespace shardwise::observe {

/// What profilers show from here to the end of the scope, in the words of torch's FSDP2: "WHAT (UNIT)", "WHAT for UNIT"
/// where something is done ahead for a unit, and "WHAT" alone for one without a name. Costs next to nothing where
/// nobody listens.
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
