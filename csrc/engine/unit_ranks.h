#pragma once

#include "comm/agree/agreement.h"
#include "comm/collectives/collectives.h"

#include <shardwise/detail/export.h>
#include <shardwise/mesh.h>
#include <shardwise/unit.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace shardwise::engine {

/// The ranks of a unit, as this rank sees them: those that hold the other shards, those that hold copies of its own,
/// and the process groups of gathers and sums. The collectives that it hands out have their place in the order that all
/// ranks agree on.
class SHARDWISE_API UnitRanks {
 public:
  /// `custom_on_mesh`: the user's own collectives get the mesh's process group, which the user knows.
  UnitRanks(const Mesh& mesh, bool replicates, bool custom_on_mesh);

  /// Makes the units' own process groups. Call it once all ranks are known to wrap the same, since they make these
  /// together.
  void make_groups();
  /// From now on `count` consecutive ranks hold everything together after forward. `given` is their process group, or
  /// null.
  void make_neighbours(int64_t count, const c10::intrusive_ptr<c10d::ProcessGroup>& given);

  /// The ranks that hold the other shards of this rank's parameters.
  const comm::Collectives& shards() const {
    return shards_;
  }
  /// The ranks that hold copies of what this rank holds.
  const comm::Collectives& copies() const {
    return copies_;
  }
  /// The ranks that hold everything together after forward; of size 1 if that takes all ranks.
  const comm::Collectives& neighbours() const {
    return neighbours_;
  }
  /// Those with copies and those with shards, in the order of the mesh's axes: together they reach all its ranks.
  std::vector<comm::Collectives> axes() const {
    return {copies_, shards_};
  }
  /// All ranks that take part in its sums.
  int64_t world() const {
    return int64_t{shards_.size()} * copies_.size();
  }
  /// Whether the stream of the mesh's device waits for their collectives, and not the host.
  bool wait_in_stream() const {
    return shards_.wait_in_stream(mesh_.device()) || copies_.wait_in_stream(mesh_.device());
  }
  /// Whether both reach the same ranks, no matter which of them hold shards or copies.
  bool has_same_ranks(const UnitRanks& other) const {
    return (shards_ == other.shards_ && copies_ == other.copies_) ||
           (shards_ == other.copies_ && copies_ == other.shards_);
  }
  /// Null where ranks do not compare what they do.
  const std::shared_ptr<comm::Agreement>& agreement() const {
    return agreement_;
  }

  /// The user's own collectives; empty if there are none. Or whether tensors are in memory of the process groups.
  struct CustomCollectives {
    CustomCollective all_gather;
    CustomCollective reduce_scatter;
    bool in_own_memory = false;
  };
  /// Raises Error unless the process groups of gathers and sums have their own memory for this device.
  void require_memory(at::Device device) const;
  struct Gather {
    /// Among neighbours() only.
    bool near = false;
    bool backward = false;
    /// The number of its unit in the agreement.
    int64_t unit = 0;
  };
  /// For the next gather. `describe` says what it is, for errors.
  comm::Collectives for_gather(
      const Gather& gather, const CustomCollectives& custom_collectives, const std::function<std::string()>& describe,
      Counters& counters);
  /// For the next sums. Nothing is compared: earlier comparisons determine these sums.
  comm::Collectives for_first_sum(const CustomCollectives& custom_collectives) const;
  comm::Collectives for_second_sum() const;
  /// The collectives that provide memory for buckets and sums; null for ordinary memory.
  const comm::Collectives* memory_of_sums(const CustomCollectives& custom_collectives) const;
  /// Whether sums share a process group with gathers or with the program's own collectives, or their order is not
  /// compared. Where no other ranks are there, no order matters.
  bool sums_share_group(const CustomCollectives& custom_collectives) const;
  /// For a collective among the shards' ranks that belongs to no unit. The ranks first agree on `event`.
  comm::Collectives for_event(int64_t event, const char* what, Counters& counters);
  /// The same among all ranks of the mesh, one axis after the other.
  std::vector<comm::Collectives> all_for_event(int64_t event, const char* what, Counters& counters);

  /// Returns when all ranks are here. If one is elsewhere, all get an error that says what each does; `text` is for
  /// this rank.
  void compare_now(int64_t event, const std::string& text, Counters& counters);
  /// Overwrites `tensor` on all ranks with the values of the mesh's first rank.
  void broadcast_from_first(const at::Tensor& tensor, const std::string& what, Counters& counters) const;

 private:
  bool gathers_on_own_group(const CustomCollectives& custom_collectives) const {
    return gathers_have_group_ && !(custom_on_mesh_ && custom_collectives.all_gather);
  }
  bool sums_on_own_groups(const CustomCollectives& custom_collectives) const {
    return sums_have_groups_ && !(custom_on_mesh_ && custom_collectives.reduce_scatter);
  }
  comm::Collectives in_order(const comm::Collectives& collectives, comm::Agreement::Chain chain) const;

  Mesh mesh_;
  bool replicates_;
  bool custom_on_mesh_;
  comm::Collectives shards_;
  comm::Collectives copies_;
  /// The shards' ranks, on a process group for gathers alone where there is one.
  comm::Collectives gather_;
  /// The shards' ranks on the mesh's own process group, which the program knows.
  comm::Collectives known_;
  comm::Collectives neighbours_;
  bool gathers_have_group_ = false;
  bool sums_have_groups_ = false;
  bool is_alone_ = false;
  std::shared_ptr<comm::Agreement> agreement_;
};

} // namespace shardwise::engine
