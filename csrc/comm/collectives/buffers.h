#pragma once

#include "comm/streams/last_use.h"

#include <shardwise/counters.h>
#include <shardwise/detail/export.h>

#include <ATen/core/Tensor.h>

#include <mutex>
#include <utility>
#include <vector>

namespace shardwise::comm {

class Collectives;

/// Memory for full parameters and for collectives, kept for reuse: after the first step or two nothing is allocated.
/// On a CPU the process's arena takes memory back when its last tensor is gone, and give() does nothing. The rest is
/// about devices. Thread safe. Memory that was used on one stream and is taken on another is waited for there.
/// What a captured graph uses stays its own: whenever the graph is replayed, it writes there, so only captures get it
/// again.
class SHARDWISE_API Buffers {
 public:
  ~Buffers();

  /// A vector of `numel` elements with arbitrary content. Counts an allocation if there is one. Unless `owner` is null,
  /// it is memory of that process group, which nobody else gets.
  at::Tensor take(
      int64_t numel, const at::TensorOptions& options, Counters& counters, const Collectives* owner = nullptr);
  /// A vector that was taken earlier is used further: if a graph is being captured, it stays that graph's.
  void use(const at::Tensor& buffer);
  /// Gives back a vector; the caller lets go of it and of its views. Its last use was on the current stream.
  void give(const at::Tensor& buffer);
  /// Notes that what was issued on the current stream is the last use of a vector, which is given back later.
  LastUse note(const at::Tensor& buffer);
  void give(const at::Tensor& buffer, LastUse last_use);
  /// Frees what is not in use, but for what graphs use.
  void free_idle();

 private:
  struct Idle {
    at::Tensor memory;
    LastUse last_use;
    /// The identity of the process group whose memory it is; null for memory like any other.
    const void* owner;
    bool captured;
  };
  Idle remove(size_t index);
  template <typename Which>
  void free_those(const Which& which);
  void forget(const Idle& idle);
  void keep_for_captures(const at::Tensor& buffer);
  bool is_captured(const at::Tensor& buffer) const;
  const void* owner_of(const at::Tensor& buffer) const;

  std::mutex mutex_;
  std::vector<Idle> idle_;
  /// Of memory that is in use now, so that their events are not made again.
  std::vector<LastUse> spare_;
  /// Storages of process groups' memory, each with its owner.
  std::vector<std::pair<const c10::StorageImpl*, const void*>> owners_;
  /// Storages that were in use while a graph was captured.
  std::vector<const c10::StorageImpl*> captured_;
};

} // namespace shardwise::comm
