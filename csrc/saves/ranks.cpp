#include "saves/ranks.h"

#include "base/reason.h"
#include "files/disk.h"

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

void Ranks::agree_on_place(const std::string& place, const std::string& verb) const {
  const auto places = together([&] { return files::without_slashes(place); });
  for (size_t rank = 0; rank < places.size(); ++rank) {
    if (places[rank] == places.front()) continue;
    throw Error(c10::str(
        "shardwise: rank ", rank, " ", verb, " ", places[rank], ", but rank 0 ", verb, " ", places.front(),
        ". All ranks must name the same place, which all of them see."));
  }
}

} // namespace shardwise::saves
