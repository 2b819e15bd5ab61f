#include "transport/progress.h"

#include "transport/error.h"

#include <c10/util/StringUtil.h>

#include <algorithm>

namespace shardwise::transport {

using Clock = std::chrono::steady_clock;

void Progress::begin(const Signature& signature, std::chrono::milliseconds timeout) {
  signature_ = signature;
  timeout_ = timeout;
  deadline_ = Clock::now() + timeout;
  ++number_;
  check();
}

std::string Progress::me() const {
  if (name_of(rank_) == rank_) return c10::str("rank ", rank_, " of ", size_);
  return c10::str("rank ", name_of(rank_), " (number ", rank_, " of the ", size_, " of its process group)");
}

std::string Progress::describe_call() const {
  return c10::str(me(), ": ", signature_.describe());
}

std::chrono::milliseconds Progress::left() const {
  const auto time = std::chrono::ceil<std::chrono::milliseconds>(deadline_ - Clock::now());
  return std::max(time, std::chrono::milliseconds(1));
}

bool Progress::late() const {
  return Clock::now() >= deadline_;
}

void Progress::check() {
  if (closed_) {
    fail(c10::str("shardwise: ", describe_call(), " failed, because its process group was shut down on this rank."));
  }
  if (broken_.empty()) return;
  raise_backend_error(c10::str(
      "shardwise: ", describe_call(),
      " was not started, because an earlier collective of this process group failed. Make a new process group. The "
      "first failure: ",
      broken_));
}

void Progress::fail(const std::string& text) {
  if (broken_.empty()) {
    broken_ = text;
    if (tell_) tell_(text);
  }
  raise_backend_error(text);
}

void Progress::fail(int peer, bool to_peer, const std::string& details) {
  const auto wanted = to_peer ? "did not take what this rank sent" : "did not send";
  const auto name = name_of(peer);
  const auto what = late() ? c10::str(
                                 wanted, " within ", timeout_.count(), " ms. Look for the error of rank ", name,
                                 " first; if there is none, it is slower than the time limit, or runs something else")
                           : c10::str(
                                 "closed the connection: its process ended, or its process group was shut down. Look "
                                 "for the error of rank ",
                                 name);
  fail_because(peer, c10::str(what, ". Details: ", details));
}

void Progress::fail_because(int peer, const std::string& what) {
  fail(c10::str("shardwise: ", describe_call(), " failed, because rank ", name_of(peer), " ", what));
}

void Progress::fail_dead(int peer) {
  fail_because(
      peer, c10::str(
                "died: its process ended. Look for the error of rank ", name_of(peer),
                "; if there is none, it left the program earlier than the others."));
}

// The peer's text begins with "shardwise: rank 2 of 3".
void Progress::fail_with(int peer, const std::string& its_failure) {
  fail_because(peer, "failed first and closed the connection: " + its_failure);
}

} // namespace shardwise::transport
