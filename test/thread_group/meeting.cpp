#include "meeting.h"

#include <c10/util/StringUtil.h>

#include <atomic>

namespace thread_group {

std::string common_name(const c10::intrusive_ptr<c10d::Store>& store, int rank) {
  static std::atomic<int> groups{0};
  if (rank == 0) store->set("threads", c10::str("number ", groups++));
  return store->get_to_str("threads");
}

void Communicator::fail(const std::string& reason) {
  const std::lock_guard lock(mutex_);
  set_failure(reason);
}

std::string Communicator::failure() {
  const std::lock_guard lock(mutex_);
  return failure_;
}

void Communicator::set_failure(const std::string& reason) {
  if (failure_.empty()) failure_ = reason;
  changed_.notify_all();
}

std::string Communicator::difference(
    const Place& place, const std::function<const std::string&(int rank)>& signature_of) const {
  for (int rank = 1; rank < place.size; ++rank) {
    if (signature_of(rank) == signature_of(0)) continue;
    return c10::str(
        "the ranks of communicator '", name_, "' call different collectives as their number ", place.number,
        ": rank 0 ", signature_of(0), ", rank ", rank, " ", signature_of(rank));
  }
  return "";
}

std::string Communicator::timed_out(
    const Place& place, const std::string& signature, std::chrono::milliseconds timeout,
    const std::function<bool(int rank)>& is_there) const {
  std::string missing;
  for (int rank = 0; rank < place.size; ++rank) {
    if (!is_there(rank)) missing += c10::str(missing.empty() ? "rank " : ", ", rank);
  }
  return c10::str(
      "communicator '", name_, "': ", signature, " timed out after ", timeout.count(),
      " ms; not there: ", missing.empty() ? "nobody, but not all came to its end" : missing);
}

} // namespace thread_group
