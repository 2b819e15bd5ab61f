#pragma once

#include "comm/streams/last_use.h"
#include "group/front_end_callbacks.h"
#include "group/parameter.h"
#include "layout/shards.h"

#include <ATen/core/Tensor.h>

#include <memory>
#include <vector>

namespace shardwise::group {

/// The shards of a rank in one vector, which is what it sends. Shards that are elsewhere are copied into it before.
class Part {
 public:
  /// Takes over the shards in the registry: each is this rank's piece, or all of the parameter, of which the piece is
  /// then taken. Moves them into the vector, which is of this kind; without `takes_memory`, pieces of that kind stay
  /// where they are, since the program may use that memory. Raises Error for a shard of other sizes. `parameters` and
  /// `layout` must outlive this object.
  Part(
      const std::vector<Parameter*>& parameters, const layout::Shards& layout, int64_t rank,
      const at::TensorOptions& kind, bool takes_memory, FrontEndCallbacks& front);

  const at::Tensor& vector() const {
    return vector_;
  }
  /// Elements of the vector that belong to shards; the others are padding.
  int64_t elements() const;
  /// Whether each shard, or this one, is where it was found, and of the same kind.
  bool fits() const;
  bool fits(size_t index) const;
  /// Whether all shards are in the vector.
  bool has_all() const;
  /// Moves shards that are elsewhere, or were replaced by others of the same kind, into the vector. Returns false, and
  /// changes nothing, if some are of another kind.
  bool take_all(FrontEndCallbacks& front);
  /// Copies shards that are elsewhere into the vector. Returns the number of bytes.
  int64_t collect() const;

  /// A device reads the vector, which is in the host's pinned memory, and writes to `place`.
  void note_read(const at::Tensor& place) {
    read_.note(place);
  }
  /// Makes the host, which is about to write to the shards, wait until that is done.
  void make_host_wait() const {
    read_.make_host_wait();
  }
  /// For a forked child, which has no memory that ranks share.
  void refuse_in_child() const;

 private:
  /// A shard as it was when it was found.
  struct Seen {
    int64_t numel;
    /// Of its first element. A shard without elements has none, and is identified by its storage.
    const void* address;
    c10::Storage storage;
    /// The shard itself if it is outside of the vector: kept alive, so that its memory is not reused.
    at::Tensor elsewhere;
  };

  at::Tensor place_of(size_t index) const;
  /// This rank's piece of what is in the registry: all of that, or a piece of it if a whole parameter was loaded there.
  at::Tensor piece_in_registry(size_t index) const;
  void move(size_t index, FrontEndCallbacks& front);
  void leave_where_it_is(size_t index, FrontEndCallbacks& front);
  void saw(size_t index, const at::Tensor& shard);
  bool is_alike(const at::TensorImpl& shard, size_t index) const;
  const void* first_element(const at::TensorImpl& shard) const {
    return static_cast<const char*>(shard.unsafe_storage().data()) + shard.storage_offset() * itemsize_;
  }

  const std::vector<Parameter*>& parameters_;
  const layout::Shards& layout_;
  int64_t rank_;
  at::Tensor vector_;
  int64_t itemsize_;
  /// Whether the vector is in memory that other ranks can read.
  bool is_shared_;
  std::vector<Seen> seen_;
  std::vector<std::shared_ptr<void>> watches_;
  comm::LastUse read_;
};

} // namespace shardwise::group
