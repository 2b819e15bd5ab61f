#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <condition_variable>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace thread_group {

/// What one rank brings to a collective: what it calls, and what the others may read.
struct Part {
  /// The operation, its sizes and types: the same on all ranks, or the program is wrong.
  std::string signature;
  std::vector<at::Tensor> inputs;
};

/// Makes one rank's results, in memory of their own.
using Compute = std::function<std::vector<at::Tensor>(const std::vector<Part>& parts)>;

/// Some ranks' way through one kind of meetings: all of them, or two for messages.
struct Place {
  std::string channel;
  /// Among those who meet there.
  int rank;
  int size;
  /// How many meetings this rank had there before.
  uint64_t number;

  std::pair<std::string, uint64_t> key() const {
    return {channel, number};
  }
};

/// A name that the ranks of a store have in common, and nobody else of the process has.
std::string common_name(const c10::intrusive_ptr<c10d::Store>& store, int rank);

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

/// What the ranks of a group have in common. How they meet is for others to say.
class Communicator {
 public:
  explicit Communicator(std::string name) : name_(std::move(name)) {}
  virtual ~Communicator() = default;

  /// From now on nobody waits here, and nothing is issued.
  void fail(const std::string& reason);
  /// Empty while all is well.
  std::string failure();

 protected:
  // Under the mutex. The first failure stays.
  virtual void set_failure(const std::string& reason);
  /// How the ranks' calls differ; empty if they do not. `signature_of(k)` is rank k's.
  std::string difference(const Place& place, const std::function<const std::string&(int rank)>& signature_of) const;
  /// That a rank has waited too long, and for whom. `is_there(k)`: whether rank k has come.
  std::string timed_out(
      const Place& place, const std::string& signature, std::chrono::milliseconds timeout,
      const std::function<bool(int rank)>& is_there) const;

  const std::string name_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::string failure_;
};

} // namespace thread_group
