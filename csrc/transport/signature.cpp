#include "transport/signature.h"

#include <c10/util/StringUtil.h>

#include <array>

namespace shardwise::transport {

std::string Signature::describe() const {
  static constexpr std::array kKinds{"an all-gather", "a reduce-scatter", "an all-reduce", "a broadcast",
                                     "a reduce",      "a gather",         "a scatter",     "an all-to-all",
                                     "a barrier",     "nothing more"};
  static constexpr std::array kOps{"sum", "average", "product", "minimum", "maximum", "and", "or", "xor", "scaled sum"};
  std::string text = kKinds.at(static_cast<size_t>(kind));
  if (op < kOps.size()) text += c10::str(" (", kOps.at(op), ")");
  if (elements >= 0) text += c10::str(" of ", elements, " elements of ", c10::toString(dtype));
  if (root >= 0) text += c10::str(" with root ", root);
  if (pieces > 0) text += c10::str(" in ", pieces, " pieces");
  return text;
}

} // namespace shardwise::transport
