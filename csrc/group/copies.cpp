#include "group/copies.h"

#include <c10/util/StringUtil.h>

namespace shardwise::group {

int64_t Copies::versions() const {
  if (!parameters_.front()->visible_parameter()) return 0;
  int64_t sum = 0;
  for (const auto* parameter : parameters_) sum += parameter->version();
  return sum;
}

comm::CollectiveName Copies::named(const std::string& unit) const {
  return [this, &unit] {
    return c10::str(
        "the all-gather of unit '", unit, "' (", parameters_.front()->name(), " and ", parameters_.size() - 1,
        " more parameters)");
  };
}

} // namespace shardwise::group
