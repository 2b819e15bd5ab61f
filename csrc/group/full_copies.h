#pragma once

#include "base/forked.h"
#include "comm/streams/side_stream.h"
#include "group/copies.h"
#include "group/front_end_callbacks.h"
#include "group/leaf_storage.h"
#include "group/part.h"
#include "group/unpacking.h"
#include "layout/shards.h"

#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace shardwise::group {

/// The full copies of a group's sharded parameters: gathered from the shards of all ranks, and freed again.
///
/// A rank sends its part (part.h). In the layout `rows` each leaf has its own storage, and what was gathered is copied
/// there (unpacking.h). In the layout `flat` the leaves are views of the gathered vector. A leaf always stays the same
/// tensor.
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
    /// Whether all shards move into the part.
    bool takes_memory;
    /// The full copies so far, which are freed. If the leaves have the same layout there, they keep their storages.
    const FullCopies* before;
  };

  /// Takes over parameters. The leaves' values are not needed: their memory is replaced by memory of the given kind.
  /// Raises Error for a shard of other sizes.
  FullCopies(std::vector<Parameter*> parameters, Setting setting, FrontEndCallbacks& front);
  ~FullCopies() override;

  bool fits() const override {
    return part_.fits();
  }
  void mark_stale() override;
  void let_host_write() override {
    part_.make_host_wait();
  }
  /// Puts the parameters' names into the errors for reads by pointer. To be called again when they are renamed.
  void name_storages(const FrontEndCallbacks& front);
  /// Whether all shards are in the part.
  bool has_memory() const {
    return part_.has_all();
  }
  /// Moves shards that are elsewhere into it (Part::take_all). The full copies must be freed.
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
  /// The elements that are gathered into memory of their own. In the layout `flat` what is gathered is the full copies,
  /// and with one rank it is the part.
  int64_t gathered_apart() const {
    if (is_flat_ || layout_.world == 1) return 0;
    return layout_.world * layout_.part - (places_directly_ ? unpacking_.placed_elements() : 0);
  }
  bool gathers_apart() const override {
    return gathered_apart() > 0;
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
  void make_rows(FrontEndCallbacks& front);
  void make_flat(FrontEndCallbacks& front);
  bool lies_as(const FullCopies& before) const;
  void take_storages(const FullCopies& before, FrontEndCallbacks& front);
  std::optional<size_t> index_of(const at::Tensor& tensor) const;

  layout::Shards layout_;
  bool is_flat_;
  int64_t rank_;
  Kinds kinds_;
  Part part_;
  std::vector<LeafStorage> storages_;
  /// Whether the full copies, while they exist, are in memory that other ranks can read.
  bool are_shared_ = false;
  base::InForkedChild in_child_{[this] { refuse_in_child(); }};
  /// In the layout `flat`: where each leaf starts in the one storage.
  std::vector<int64_t> starts_;
  /// In the layout `rows`.
  Unpacking unpacking_;
  /// Whether the last gather placed large pieces directly.
  bool places_directly_ = false;
  std::vector<std::shared_ptr<void>> watches_;
  /// What this rank holds after forward: several consecutive parts.
  at::Tensor held_;
  /// The gather under way sends it.
  bool from_held_ = false;
  /// Shards in the host's memory are copied and gathered on a side stream, so that computation does not wait.
  comm::SideStream from_host_;
  /// Where the gather began, once the device had read the part in the host's pinned memory.
  comm::LastUse begun_;
};

} // namespace shardwise::group
