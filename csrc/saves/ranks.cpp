#include "saves/ranks.h"

#include "base/reason.h"

#include <shardwise/error.h>

#include <c10/util/StringUtil.h>

#include <exception>

namespace shardwise::saves {

std::vector<std::string> Ranks::together(const std::function<std::string()>& act) const {
  constexpr char kWell = '+';
  constexpr char kFailed = '!';
  std::string mine;
  std::exception_ptr own;
  try {
    mine = kWell + act();
  } catch (const std::exception& error) {
    own = std::current_exception();
    mine = kFailed + base::text_of(error);
  }
  // A rank that failed comes too: the others wait for it.
  auto texts = exchange_ ? exchange_(mine) : std::vector<std::string>{mine};
  if (own) std::rethrow_exception(own);
  for (size_t rank = 0; rank < texts.size(); ++rank) {
    if (texts[rank].starts_with(kFailed)) throw Error(c10::str("on rank ", rank, ": ", texts[rank].substr(1)));
  }
  for (auto& text : texts) text.erase(0, 1);
  return texts;
}

} // namespace shardwise::saves
