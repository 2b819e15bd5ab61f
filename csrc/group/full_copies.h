#pragma once

#include "base/forked.h"
#include "group/copies.h"
#include "group/copy_batch.h"
#include "group/front_end_callbacks.h"
#include "group/leaf_storage.h"
#include "layout/shards.h"

#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace shardwise::group {

/// The full copies of a group's sharded parameters: brought together from the shards of all ranks, and freed.
///
/// The shards of a rank lie in one vector, its part, which goes on the wire as it is. In the layout `rows` each leaf
/// has memory of its own, and what was gathered is copied into it, unless it landed there at once; in the layout `flat`
/// the leaves are views of the gathered vector itself. A leaf stays the same tensor for life.
class FullCopies : public Copies {
 public:
  /// Device and dtype. What is sent is of the kind of the full copies.
  struct Kinds {
    at::TensorOptions shards;
    at::TensorOptions full;
  };

  /// How they are made.
  struct Setting {
    layout::Shards layout;
    bool is_flat;
    int64_t rank;
    Kinds kinds;
    /// The shards lie in the part from now on. Else those that are pieces stay where they are, for somebody may hold
    /// that memory, and are copied into the part before each gather.
    bool takes_memory;
    /// Where the leaves lie as these did, whose memory is freed, they stay there.
    const FullCopies* before;
  };

  /// Takes over parameters whose shards hold this rank's piece, or all of the parameter, of which the piece is then
  /// taken. The values of the leaves are not needed; their memory is replaced, and of the kind given from now on.
  /// Raises Error for a shard of other sizes.
  FullCopies(std::vector<Parameter*> parameters, Setting setting, FrontEndCallbacks& front);

  bool fits() const override;
  void mark_stale() override;
  /// Parameters were renamed: who reads full copies where no use is seen is told their names.
  void name_storages(const FrontEndCallbacks& front);
  /// Whether all shards lie in the part.
  bool has_memory() const;
  /// Lets shards that lie elsewhere, or were replaced by others of the same kind, lie in the part. False, and nothing
  /// changed, where they are of another kind. The full copies must be freed.
  bool take_memory(FrontEndCallbacks& front);
  /// Whether a use of this tensor, a leaf or a view of one, needs nothing: the full copies are current, and the shard
  /// of that leaf is what it was made for and is trained as the leaf is. False for other tensors.
  bool serves(const at::Tensor& tensor) const;
  void begin_unshard(
      const comm::Collectives& collectives, bool may_hold, comm::Buffers& buffers, const std::string& unit,
      Counters& counters) override;
  bool finish_unshard(int64_t holders, comm::Buffers& buffers, const std::string& unit, Counters& counters) override;
  bool holds() const override {
    return held_.defined() && !written();
  }
  void drop_held(comm::Buffers& buffers) override;
  void reshard(comm::Buffers& buffers, Counters& counters) override;

  /// Whole values of the parameters, one for each, gathered apart from the full copies, which stay as they are: new
  /// tensors on `device`. Undefined where `wanted` is not; all ranks take part whatever they want.
  std::vector<at::Tensor> gather_values(
      const std::vector<bool>& wanted, std::optional<at::Device> device, const comm::Collectives& collectives,
      comm::Buffers& buffers, const std::string& unit, Counters& counters) const;
  /// Writes this rank's piece of a whole value into the shard of parameter number `index`.
  void store(size_t index, const at::Tensor& value);

  /// The parameter that lies at the memory of this tensor; null when none does.
  const Parameter* find(const at::Tensor& tensor) const;

  /// Bytes of the part, what of it is padding, what is sent of it, and of all full copies, which are of that dtype.
  struct Sizes {
    int64_t part;
    int64_t padding;
    int64_t sent;
    int64_t full;
    at::ScalarType dtype;
  };
  Sizes sizes() const;

 private:
  /// A rank's piece of a leaf: `rows` of it, that is `runs` of its elements.
  struct Copy {
    size_t leaf;
    at::Tensor rows;
    Runs runs;
    int64_t rank;
    int64_t offset;
    bool is_moved;
    /// Whether it goes to its place at once where a gather takes a placement.
    bool can_place = false;
  };

  bool is_sent_as_it_is() const {
    return kinds_.shards.dtype() == kinds_.full.dtype() && kinds_.shards.device() == kinds_.full.device();
  }
  void refill(comm::Buffers& buffers, Counters& counters);
  void refuse_in_child();
  void leave_buffers();
  void release(comm::Buffers& buffers);
  void hold(int64_t holders, comm::Buffers& buffers, Counters& counters);
  void adopt_shards(FrontEndCallbacks& front, bool takes_memory);
  at::Tensor place_of(size_t index) const;
  void place(size_t index, FrontEndCallbacks& front);
  void leave_where_it_is(size_t index, FrontEndCallbacks& front);
  void saw(size_t index, const at::Tensor& shard);
  bool is_alike(const at::TensorImpl& shard, size_t index) const;
  int64_t collect() const;
  void make_rows(FrontEndCallbacks& front);
  void make_flat(FrontEndCallbacks& front);
  void find_placements();
  bool lies_as(const FullCopies& before) const;
  void take_storages(const FullCopies& before, FrontEndCallbacks& front);
  bool fits(size_t index) const;
  std::optional<size_t> index_of(const at::Tensor& tensor) const;
  void copy_out();

  layout::Shards layout_;
  bool is_flat_;
  int64_t rank_;
  Kinds kinds_;
  at::Tensor part_;
  std::vector<LeafStorage> storages_;
  /// Whether the part, and full copies that are there, lie in memory that other ranks can read.
  bool part_is_shared_ = false;
  bool are_shared_ = false;
  base::InForkedChild in_child_{[this] { refuse_in_child(); }};
  /// In the layout `flat`, where the one storage has them.
  std::vector<int64_t> starts_;
  /// Of all of them, while they are not freed.
  at::Tensor memory_;
  std::vector<Copy> copies_;
  /// Of large pieces, and how many bytes those are.
  std::vector<transport::DirectPlacement::Range> placements_;
  int64_t placed_bytes_ = 0;
  /// Whether those of the last gather went to their places at once.
  bool places_directly_ = false;
  /// Where what was gathered lies, where the full copies do, and whether large pieces landed there. Buffers come back
  /// to the same places, so that the moves between them are those of another time.
  using Places = std::tuple<const void*, const void*, bool>;
  std::vector<std::pair<Places, CopyBatch>> known_moves_;
  /// Out of what was gathered, where nothing landed.
  int64_t copied_bytes_ = 0;
  /// Elements of this rank's pieces.
  std::vector<int64_t> numels_;
  std::vector<std::shared_ptr<void>> watches_;
  /// Shards that lie elsewhere, as they were when that was seen; held, so that nothing else comes to lie there.
  std::vector<at::Tensor> elsewhere_;
  /// The shards' storages. Those without elements lie nowhere: one that is replaced has another, as on other ranks.
  std::vector<c10::Storage> seen_;
  /// Where their first elements lie.
  std::vector<const void*> lies_at_;
  at::Tensor gathered_;
  /// Several parts in a row.
  at::Tensor held_;
  /// The part as it is sent, where it is cast or moved.
  at::Tensor sent_;
  std::optional<comm::Pending> pending_;
};

} // namespace shardwise::group
