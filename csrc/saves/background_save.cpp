#include "saves/background_save.h"

#include "base/caller.h"
#include "base/forked.h"
#include "base/reason.h"

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <utility>

namespace shardwise::saves {
namespace {

/// Once the process exits with 0, it exits with 1 instead.
void exit_with_an_error() {
  static std::once_flag once;
  // The C library then runs the other functions for the end of the process, and uses the last status.
  std::call_once(
      once, [] { ::on_exit([](int status, void*) { status == 0 ? std::exit(EXIT_FAILURE) : void(); }, nullptr); });
}

} // namespace

BackgroundSave::~BackgroundSave() {
  finish();
}

void BackgroundSave::finish() noexcept {
  try {
    is_the_parents() ? leave_to_the_parent() : wait();
  } catch (const std::exception& error) {
    exit_with_an_error();
    std::fprintf(
        stderr,
        "shardwise: the last save of an AsyncSaver failed, so this process will exit with an error: %s\n"
        "Call wait() before the AsyncSaver ends to handle that.\n",
        base::reason(error).c_str());
  }
}

void BackgroundSave::begin(
    const Ranks& ranks, const Ranks& beside, files::Disk& disk, const std::string& place,
    const std::vector<Piece>& pieces, files::Marker about) {
  wait();
  auto begun = std::make_unique<SaveInProgress>(ranks, disk, place, pieces, std::move(about), division_, &snapshot_);
  forks_ = base::forks();
  last_ = std::async(std::launch::async, [begun = std::move(begun), beside]() mutable {
    // Its memory and files are released before wait() returns.
    std::exchange(begun, nullptr)->finish(beside);
  });
}

bool BackgroundSave::is_the_parents() const {
  return last_.valid() && base::forks() != forks_;
}

// Never destroyed: in a forked child the future's destructor would wait for ever.
void BackgroundSave::leave_to_the_parent() {
  static_cast<void>(new std::future<void>(std::move(last_)));
}

void BackgroundSave::wait() {
  if (is_the_parents()) {
    leave_to_the_parent();
    base::require_not_forked(forks_, "the save that was under way");
  }
  if (!last_.valid()) return;
  const base::WithoutCallerLock unlocked;
  last_.get();
}

bool BackgroundSave::is_under_way() const {
  return last_.valid() && !is_the_parents() && last_.wait_for(std::chrono::seconds(0)) != std::future_status::ready;
}

} // namespace shardwise::saves
