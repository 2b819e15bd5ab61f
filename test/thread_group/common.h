#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

namespace thread_group {

/// The same object for all `size` threads that give the same name, made by the first. It waits for the last of them,
/// even if the others are done with it.
template <typename Object, typename... Arguments>
std::shared_ptr<Object> common(const std::string& name, int size, const Arguments&... arguments) {
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
