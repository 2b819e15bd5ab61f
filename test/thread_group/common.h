#pragma once

#include "meeting.h"

#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

namespace thread_group {

/// The same object for all `size` ranks of a store, which are threads, made by the first. It waits for the last of
/// them, even if the others are done with it.
template <typename Object, typename... Arguments>
std::shared_ptr<Object> common(
    const c10::intrusive_ptr<c10d::Store>& store, int rank, int size, const Arguments&... arguments) {
  const auto name = common_name(store, rank);
  struct Shared {
    std::shared_ptr<Object> object;
    int taken = 0;
  };
  static std::mutex mutex;
  static auto* const all = new std::map<std::string, Shared>;
  const std::lock_guard lock(mutex);
  auto& shared = (*all)[name];
  if (!shared.object) shared.object = std::make_shared<Object>(name, arguments...);
  const auto object = shared.object;
  if (++shared.taken == size) all->erase(name);
  return object;
}

} // namespace thread_group
