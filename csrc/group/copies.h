#pragma once

#include "comm/collectives/buffers.h"
#include "comm/collectives/collectives.h"
#include "group/parameter.h"

#include <shardwise/counters.h>

#include <c10/util/StringUtil.h>

#include <optional>
#include <string>
#include <vector>

namespace shardwise::group {

/// Full copies of a group's parameters: gathered from the shards of all ranks, and freed again.
class Copies {
 public:
  /// `freed` -> gathering -> full -> freed.
  enum class State { freed, gathering, full };

  explicit Copies(std::vector<Parameter*> parameters) : parameters_(std::move(parameters)) {}
  Copies(const Copies&) = delete;
  Copies& operator=(const Copies&) = delete;
  virtual ~Copies() = default;

  State state() const {
    return state_;
  }
  /// Whether they are full, and no shard was written since.
  bool current() const {
    return state_ == State::full && !written();
  }
  /// A shard was written: a full copy that is kept is out of date.
  virtual void mark_stale() {
    stale_ = true;
  }
  /// Called before the host writes to the shards: makes it wait until the device has read them.
  virtual void let_host_write() {}
  bool must_gather() const {
    return state_ != State::gathering && !current();
  }
  /// Whether each shard is still of the kind that these copies were made for.
  virtual bool fits() const = 0;

  /// Does what can fail on this rank alone, before the gather is announced to the other ranks.
  virtual void prepare() {}
  /// Starts to gather the full copies. Does nothing if they are current or being gathered. `may_hold`: whether
  /// finish_unshard() may be asked to hold this rank's share.
  void begin_unshard(
      const comm::Collectives& collectives, bool may_hold, comm::Buffers& buffers, const std::string& unit,
      Counters& counters);
  /// Called before they are used in this capture of a graph, 0 for none. What was gathered in another one is out of
  /// date: what a graph gathers is there only when it is replayed, and a replay needs what is in the shards by then.
  void use_in(uint64_t capture, comm::Buffers& buffers) {
    if (gathered_in_ != capture) mark_stale();
    gathered_in_ = capture;
    if (capture != 0 && memory_.defined()) buffers.use(memory_);
  }
  /// Finishes the gather under way, if any. Returns whether a shard was written meanwhile, so that the gather must be
  /// repeated. If `holders` is above 1, holds this rank's share of what that many consecutive ranks hold together.
  bool finish_unshard(int64_t holders, comm::Buffers& buffers, const std::string& unit, Counters& counters);
  /// Whether the held share is current: begin_unshard() then gets collectives among the holders alone.
  virtual bool holds() const {
    return false;
  }
  virtual void drop_held(comm::Buffers& /*buffers*/) {}
  /// Frees them. `keeps_memory`: no other tensor gets their memory, so the next gather fills the same addresses.
  void reshard(comm::Buffers& buffers, bool keeps_memory, Counters& counters);

 protected:
  const std::vector<Parameter*>& parameters() const {
    return parameters_;
  }
  /// Takes memory for a gather, and prepares what this rank sends. `from_held`: the held share.
  virtual void provide(
      bool from_held, bool may_hold, const comm::Collectives& collectives, comm::Buffers& buffers,
      Counters& counters) = 0;
  /// Starts the collective; without other ranks there is none.
  virtual void start(
      const comm::Collectives& collectives, comm::Buffers& buffers, const std::string& unit, Counters& counters) = 0;
  /// Once it is done: gives the leaves their memory and values.
  virtual void copy_out(int64_t holders, comm::Buffers& buffers, Counters& counters) = 0;
  virtual void free_leaves() = 0;
  /// Whether what is gathered has separate memory, which goes back to the pool.
  virtual bool gathers_apart() const = 0;
  /// Whether a gather writes to the memory of the full copies.
  virtual bool gathers_into_leaves() const {
    return false;
  }
  /// Makes what is issued from now on wait for the gather, if that runs on a side stream.
  virtual void await_gather() {}

  /// Whether a shard was written since the last gather began.
  bool written() const {
    return stale_ || versions() != gathered_versions_;
  }
  /// The name of the gather, for errors. Refers to this object and to `unit`: it is only called while the gather is
  /// started or waited for, when both exist.
  comm::CollectiveName named(const std::string& unit) const {
    return [this, &unit] {
      return c10::str(
          "the all-gather of unit '", unit, "' (", parameters_.front()->name(), " and ", parameters_.size() - 1,
          " more parameters)");
    };
  }

  /// The memory of all full copies, while they are not freed.
  at::Tensor memory_;
  at::Tensor gathered_;
  /// What this rank sends, if it must first be cast, moved or joined.
  at::Tensor sent_;
  std::optional<comm::Pending> pending_;

 private:
  /// A gather that failed may still be using its buffers: they do not go back to the pool.
  void leave_buffers();
  /// The result of a gather that failed must not reach any unit.
  void drop_gather(comm::Buffers& buffers, Counters& counters);
  void release(comm::Buffers& buffers);
  int64_t versions() const {
    if (!parameters_.front()->visible_parameter()) return 0;
    int64_t sum = 0;
    for (const auto* parameter : parameters_) sum += parameter->version();
    return sum;
  }

  std::vector<Parameter*> parameters_;
  State state_ = State::freed;
  bool stale_ = false;
  int64_t gathered_versions_ = 0;
  uint64_t gathered_in_ = 0;
};

} // namespace shardwise::group
