#include "transport/onlooker.h"

#include <algorithm>
#include <utility>
#include <vector>

namespace shardwise::transport {
namespace {

std::vector<std::weak_ptr<Onlooker>>& onlookers() {
  static thread_local std::vector<std::weak_ptr<Onlooker>> all;
  return all;
}

} // namespace

void Onlooker::of_this_thread(std::weak_ptr<Onlooker> onlooker) {
  auto& all = onlookers();
  std::erase_if(all, [](const auto& other) { return other.expired(); });
  all.push_back(std::move(onlooker));
}

void Onlooker::wait(
    const std::function<OwnCall()>& call, const std::function<bool(std::chrono::milliseconds)>& ends_within) {
  constexpr std::chrono::milliseconds kFirst{1000};
  constexpr std::chrono::milliseconds kNext{200};
  for (auto slice = kFirst; !ends_within(slice); slice = kNext) {
    for (const auto& one : std::vector(onlookers())) {
      if (const auto onlooker = one.lock()) onlooker->look_at(call());
    }
  }
}

} // namespace shardwise::transport
