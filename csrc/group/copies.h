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
  /// The host is about to write to the shards: it waits until the device has read what was sent of them.
  virtual void let_host_write() {}
  bool must_gather() const {
    return state_ != State::gathering && !current();
  }
  /// Whether each shard is still of the kind that these copies were made for.
  virtual bool fits() const = 0;

  /// Does what can fail on this rank alone, before the other ranks hear of a gather.
  virtual void prepare() {}
  /// Starts to bring the full copies. Does nothing if they are current or on their way. `may_hold`: whether
  /// finish_unshard() may be asked to put something aside.
  void begin_unshard(
      const comm::Collectives& collectives, bool may_hold, comm::Buffers& buffers, const std::string& unit,
      Counters& counters);
  /// Ends what was begun, if anything was. Returns whether a shard was written meanwhile, so that it has to begin
  /// again. If `holders` ranks in a row are to hold everything together, puts this rank's share aside; if it is 1,
  /// nothing.
  bool finish_unshard(int64_t holders, comm::Buffers& buffers, const std::string& unit, Counters& counters);
  /// Whether what was put aside is current: begin_unshard() is then given collectives among the holders alone.
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
  /// Takes memory for a gather, and puts there what this rank sends. `from_held`: of what was put aside.
  virtual void provide(
      bool from_held, bool may_hold, const comm::Collectives& collectives, comm::Buffers& buffers,
      Counters& counters) = 0;
  /// Starts the collective; without other ranks there is none.
  virtual void start(
      const comm::Collectives& collectives, comm::Buffers& buffers, const std::string& unit, Counters& counters) = 0;
  /// Once it is done: gives the leaves their memory and values.
  virtual void copy_out(int64_t holders, comm::Buffers& buffers, Counters& counters) = 0;
  virtual void free_leaves() = 0;
  /// Whether what is gathered has memory of its own, which goes back to the pool.
  virtual bool gathers_apart() const = 0;
  /// Whether a gather writes to the memory of the full copies.
  virtual bool gathers_into_leaves() const {
    return false;
  }
  /// What is issued from now on comes after the gather, as far as it is on a stream of its own.
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
  /// What this rank sends, where it has to be cast, moved or joined for that.
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
};

} // namespace shardwise::group
