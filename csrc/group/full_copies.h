#pragma once

#include "base/forked.h"
#include "comm/streams/side_stream.h"
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

/// The full copies of a group's sharded parameters: gathered from the shards of all ranks, and freed again.
///
/// The shards of a rank are in one vector, its part, which is what it sends. In the layout `rows` each leaf has its own
/// storage, and what was gathered is copied there, unless it arrived there directly. In the layout `flat` the leaves
/// are views of the gathered vector. A leaf always stays the same tensor.
class FullCopies : public Copies {
 public:
  /// Devices and dtypes. What is sent has those of the full copies.
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
    /// Whether the shards move into the part. If not, shards that are pieces already stay where they are, since
    /// the program may use that memory, and are copied into the part before each gather.
    bool takes_memory;
    /// The full copies so far, which are freed. If the leaves have the same layout there, they keep their storages.
    const FullCopies* before;
  };

  /// Takes over parameters. A shard holds this rank's piece, or all of the parameter, of which the piece is then taken.
  /// The leaves' values are not needed: their memory is replaced by memory of the given kind. Raises Error for a shard
  /// of other sizes.
  FullCopies(std::vector<Parameter*> parameters, Setting setting, FrontEndCallbacks& front);
  ~FullCopies() override;

  /// Whether a gather over our own transport can put a rank's piece of a leaf in place without a copy.
  static bool can_place(const layout::Cut& cut, int64_t rank, at::ScalarType dtype);
  /// The elements of such full copies, with room at the end for gathered pieces that are not placed. `leaves` (with
  /// their padding), `gathered` and `placed` are counts of elements too.
  static int64_t with_rest(int64_t leaves, int64_t gathered, int64_t placed);

  bool fits() const override;
  void mark_stale() override;
  void let_host_write() override {
    host_read_.make_host_wait();
  }
  /// Puts the parameters' names into the errors for reads by pointer. To be called again when they are renamed.
  void name_storages(const FrontEndCallbacks& front);
  /// Whether all shards are in the part.
  bool has_memory() const;
  /// Moves shards that are elsewhere, or were replaced by others of the same kind, into the part. Returns false, and
  /// changes nothing, if some are of another kind. The full copies must be freed.
  bool take_memory(FrontEndCallbacks& front);
  /// Whether this tensor, a leaf or a view of one, can be used at once: the full copies are current, and the leaf's
  /// shard was not replaced and has the leaf's requires_grad. False for other tensors.
  bool serves(const at::Tensor& tensor) const;
  bool holds() const override {
    return held_.defined() && !written();
  }
  void drop_held(comm::Buffers& buffers) override;

  /// Whole values of the parameters, one for each, as new tensors on `device`; undefined where `wanted` is false. All
  /// ranks take part, whatever they want. The full copies stay as they are.
  std::vector<at::Tensor> gather_values(
      const std::vector<bool>& wanted, std::optional<at::Device> device, const comm::Collectives& collectives,
      comm::Buffers& buffers, const std::string& unit, Counters& counters) const;
  /// The same for tensors that are cut like the parameters, such as what an optimizer keeps for shards: `pieces` are
  /// this rank's, one for each parameter, undefined if no rank has one. This rank gets the values only if `keep`.
  std::vector<at::Tensor> gather_pieces(
      const std::vector<at::Tensor>& pieces, bool keep, std::optional<at::Device> device,
      const comm::Collectives& collectives, comm::Buffers& buffers, const std::string& unit, Counters& counters) const;
  /// How parameter number `index` is divided, and which piece of it is this rank's.
  const layout::Cut& cut(size_t index) const {
    return layout_.cuts[index];
  }
  int64_t rank() const {
    return rank_;
  }
  /// This rank's piece of a tensor with the sizes of parameter number `index`: a view if possible.
  at::Tensor piece_in_whole(size_t index, const at::Tensor& whole) const;
  /// Writes this rank's piece of a whole value into the shard of parameter number `index`.
  void store(size_t index, const at::Tensor& value);
  /// Writes this rank's piece itself into the shard.
  void store_piece(size_t index, const at::Tensor& piece);

  /// The parameter whose full copy is in this tensor's memory; null if there is none.
  const Parameter* find(const at::Tensor& tensor) const;

  /// In bytes: the part, the padding in it, what is sent of it, and all full copies, which are of this dtype.
  struct Sizes {
    int64_t part;
    int64_t padding;
    int64_t sent;
    int64_t full;
    at::ScalarType dtype;
  };
  Sizes sizes() const;

 private:
  /// A rank's piece of a leaf: the view `rows` of it, which is `runs` of its elements.
  struct Copy {
    size_t leaf;
    at::Tensor rows;
    Runs runs;
    int64_t rank;
    int64_t offset;
    bool is_moved;
    /// Whether a gather with a placement puts it into its place directly; if not, where in the memory of the full
    /// copies it arrives.
    bool can_place = false;
    int64_t rest = 0;
  };

  bool lies_on_full_device() const {
    return kinds_.shards.device() == kinds_.full.device();
  }
  bool is_sent_as_it_is() const {
    return kinds_.shards.dtype() == kinds_.full.dtype() && lies_on_full_device();
  }
  void provide(
      bool from_held, bool may_hold, const comm::Collectives& collectives, comm::Buffers& buffers,
      Counters& counters) override;
  void start(const comm::Collectives& collectives, comm::Buffers& buffers, const std::string& unit, Counters& counters)
      override;
  void copy_out(int64_t holders, comm::Buffers& buffers, Counters& counters) override;
  void free_leaves() override {
    for (auto& storage : storages_) storage.free();
  }
  // In the layout `flat` what is gathered is the full copies, and with one rank it is the part.
  bool gathers_apart() const override {
    return !gathers_into_leaves() && layout_.world > 1;
  }
  bool gathers_into_leaves() const override {
    return is_flat_ || places_directly_;
  }
  void await_gather() override;
  std::vector<at::Tensor> gather_parts(
      const at::Tensor& part, const std::vector<bool>& wanted, at::Device device, const comm::Collectives& collectives,
      comm::Buffers& buffers, const std::string& unit, Counters& counters) const;
  at::Tensor send(comm::Buffers& buffers, Counters& counters);
  at::Tensor put_in_place(const at::Tensor& part, const comm::Collectives& collectives, Counters& counters);
  void put(const at::Tensor& part, const at::Tensor& place, Counters& counters);
  void refill(const comm::Collectives* owner, comm::Buffers& buffers, Counters& counters);
  void refuse_in_child();
  void hold(int64_t holders, comm::Buffers& buffers, Counters& counters);
  void adopt_shards(FrontEndCallbacks& front, bool takes_memory);
  at::Tensor own_part(size_t index) const;
  void move_into_part(size_t index, FrontEndCallbacks& front);
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
  void copy_pieces();

  layout::Shards layout_;
  bool is_flat_;
  int64_t rank_;
  Kinds kinds_;
  /// Of the shards.
  size_t itemsize_;
  at::Tensor part_;
  std::vector<LeafStorage> storages_;
  /// Whether the part, and the full copies while they exist, are in memory that other ranks can read.
  bool part_is_shared_ = false;
  bool are_shared_ = false;
  base::InForkedChild in_child_{[this] { refuse_in_child(); }};
  /// In the layout `flat`: where each leaf starts in the one storage.
  std::vector<int64_t> starts_;
  std::vector<Copy> copies_;
  /// Where everything goes if large pieces are placed directly, and how many elements those have. Empty if there are
  /// none.
  std::vector<transport::DirectPlacement::Range> placements_;
  int64_t placed_ = 0;
  /// Whether the last gather placed them directly.
  bool places_directly_ = false;
  /// Where the gathered buffer and the full copies are, and whether large pieces were placed directly. The pool hands
  /// out the same buffers again, so moves between them can be repeated.
  using Addresses = std::tuple<const void*, const void*, bool>;
  std::vector<std::pair<Addresses, CopyBatch>> known_moves_;
  /// Bytes that are copied out of a gathered buffer if nothing is placed directly.
  int64_t copied_bytes_ = 0;
  std::vector<std::shared_ptr<void>> watches_;
  /// A shard as it was when it was found.
  struct Seen {
    int64_t numel;
    /// Of its first element. A shard without elements has none, and is identified by its storage.
    const void* address;
    c10::Storage storage;
    /// The shard itself if it is outside of the part: kept alive, so that its memory is not reused.
    at::Tensor elsewhere;
  };
  std::vector<Seen> seen_;
  /// What this rank holds after forward: several consecutive parts.
  at::Tensor held_;
  /// The gather under way sends it.
  bool from_held_ = false;
  /// Shards in the host's memory are copied and gathered on a side stream, so that computation does not wait.
  comm::SideStream from_host_;
  /// Where the device read the part in the host's pinned memory, and where the gather began after that.
  comm::LastUse host_read_;
  comm::LastUse begun_;
};

} // namespace shardwise::group
