#include "meeting.h"

#include <c10/util/StringUtil.h>

#include <atomic>

namespace thread_group {

std::string common_name(const c10::intrusive_ptr<c10d::Store>& store, int rank) {
  static std::atomic<int> groups{0};
  if (rank == 0) store->set("threads", c10::str("number ", groups++));
  return store->get_to_str("threads");
}

std::string difference(
    const std::string& communicator, const Place& place,
    const std::function<const std::string&(int rank)>& signature_of) {
  for (int rank = 1; rank < place.size; ++rank) {
    if (signature_of(rank) == signature_of(0)) continue;
    return c10::str(
        "the ranks of communicator '", communicator, "' call different collectives as their number ", place.number,
        ": rank 0 ", signature_of(0), ", rank ", rank, " ", signature_of(rank));
  }
  return "";
}

std::string timed_out(
    const std::string& communicator, const Place& place, const std::string& signature,
    std::chrono::milliseconds timeout, const std::function<bool(int rank)>& is_there) {
  std::string missing;
  for (int rank = 0; rank < place.size; ++rank) {
    if (!is_there(rank)) missing += c10::str(missing.empty() ? "rank " : ", ", rank);
  }
  return c10::str(
      "communicator '", communicator, "': ", signature, " timed out after ", timeout.count(),
      " ms; not there: ", missing.empty() ? "nobody, but not all came to its end" : missing);
}

} // namespace thread_group
