#include "saves/background_save.h"

#include "base/caller_lock.h"
#include "base/reason.h"

#include <c10/util/Exception.h>

#include <chrono>
#include <memory>
#include <utility>

namespace shardwise::saves {

BackgroundSave::~BackgroundSave() {
  try {
    wait();
  } catch (const std::exception& error) {
    TORCH_WARN("shardwise: a save in the background failed: ", base::reason(error));
  }
}

void BackgroundSave::begin(
    const Ranks& ranks, const Ranks& beside, files::Disk& disk, const std::string& place,
    const std::vector<Piece>& pieces, files::Marker about) {
  wait();
  auto begun = std::make_unique<BegunSave>(ranks, disk, place, pieces, std::move(about), division_, &snapshot_);
  last_ = std::async(std::launch::async, [begun = std::move(begun), beside]() mutable {
    // Its memory and files go before anybody hears that it is over.
    std::exchange(begun, nullptr)->finish(beside);
  });
}

void BackgroundSave::wait() {
  if (!last_.valid()) return;
  const base::WithoutCallerLock unlocked;
  last_.get();
}

bool BackgroundSave::is_under_way() const {
  return last_.valid() && last_.wait_for(std::chrono::seconds(0)) != std::future_status::ready;
}

} // namespace shardwise::saves
