#pragma once

#include "comm/agreement.h"
#include "comm/collectives.h"

#include <shardwise/export.h>
#include <shardwise/mesh.h>
#include <shardwise/unit.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace shardwise::engine {

/// Who shares what with whom in a unit: the ranks that hold the other shards, those that hold copies of this rank's,
/// and the process groups of its gathers and sums. What it gives has its place in the order that all ranks agree upon.
class SHARDWISE_API UnitRanks {
 public:
  /// `customs_on_mesh`: a collective of the user's own gets the mesh's process group, which he knows.
  UnitRanks(const Mesh& mesh, bool replicates, bool customs_on_mesh);

  /// The units' own process groups. Once all ranks are known to wrap the same, for they make these together.
  void make_groups();
  /// So many ranks hold everything together after forward: `given` is their process group, or null.
  void make_neighbours(int64_t count, const c10::intrusive_ptr<c10d::ProcessGroup>& given);

  /// The ranks that hold the other shards of what this one holds.
  const comm::Collectives& shards() const {
    return shards_;
  }
  /// The ranks that hold the same as this one.
  const comm::Collectives& copies() const {
    return copies_;
  }
  /// Those that hold everything together after forward; of nobody where those are all.
  const comm::Collectives& neighbours() const {
    return neighbours_;
  }
  /// Shards and copies, in the order of the mesh's axes: together they reach all its ranks.
  std::vector<comm::Collectives> axes() const {
    return {copies_, shards_};
  }
  /// All ranks that take part in its sums.
  int64_t world() const {
    return int64_t{shards_.size()} * copies_.size();
  }
  /// Whether both reach the same ranks, be it with shards or with copies.
  bool reach_the_same(const UnitRanks& other) const {
    return (shards_ == other.shards_ && copies_ == other.copies_) ||
           (shards_ == other.copies_ && copies_ == other.shards_);
  }
  /// Null where nothing is compared.
  const std::shared_ptr<comm::Agreement>& agreement() const {
    return agreement_;
  }

  /// Collectives that are the user's own where he gave some.
  struct Customs {
    CustomCollective all_gather;
    CustomCollective reduce_scatter;
  };
  struct Gather {
    /// It is among the neighbours.
    bool near = false;
    bool backward = false;
    /// Its unit's number among all of the agreement.
    int64_t unit = 0;
  };
  /// For the gather that comes next. `describe` tells what it is, for errors.
  comm::Collectives for_gather(
      const Gather& gather, const Customs& customs, const std::function<std::string()>& describe, Counters& counters);
  /// For the sums that come next: what they are follows from what was compared before.
  comm::Collectives for_first_sum(const Customs& customs) const;
  comm::Collectives for_second_sum() const;
  /// Sums and gathers, or collectives of the program's own, share a process group, or nobody compares the order.
  bool must_sum_late(const Customs& customs) const;
  /// For a collective among the shards' ranks that belongs to no unit, once all ranks are about to issue it: `event` of
  /// the agreement.
  comm::Collectives for_event(int64_t event, const char* what, Counters& counters);

  /// All ranks come here, or get an error that names what each does: this one `text`.
  void meet(int64_t event, const std::string& text, Counters& counters);
  /// Overwrites with the values of the mesh's first rank, on all of them.
  void spread(const at::Tensor& tensor, const std::string& what, Counters& counters) const;

 private:
  bool gathers_apart(const Customs& customs) const {
    return gathers_have_group_ && !(customs_on_mesh_ && customs.all_gather);
  }
  bool sums_apart(const Customs& customs) const {
    return sums_have_groups_ && !(customs_on_mesh_ && customs.reduce_scatter);
  }
  comm::Collectives in_order(const comm::Collectives& collectives, comm::Agreement::Chain chain) const;

  Mesh mesh_;
  bool replicates_;
  bool customs_on_mesh_;
  comm::Collectives shards_;
  comm::Collectives copies_;
  /// Among the shards' ranks, on a process group of its own where there is one.
  comm::Collectives gather_;
  /// The same on the mesh's process group, which the program knows.
  comm::Collectives known_;
  comm::Collectives neighbours_;
  bool gathers_have_group_ = false;
  bool sums_have_groups_ = false;
  std::shared_ptr<comm::Agreement> agreement_;
};

} // namespace shardwise::engine
