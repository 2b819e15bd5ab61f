#pragma once

#include "group/copy_batch.h"
#include "layout/shards.h"
#include "transport/transport.h"

#include <ATen/core/Tensor.h>

#include <tuple>
#include <utility>
#include <vector>

namespace shardwise::group {

/// How gathered parts become leaves in the layout `rows`: pieces are copied to their places, or arrive there directly.
class Unpacking {
 public:
  /// Whether a gather over our own transport can put a rank's piece of a leaf in place without a copy.
  static bool can_place(const layout::Cut& cut, int64_t rank, at::ScalarType dtype);

  Unpacking() = default;
  /// For leaves that lie one after the other in one piece of memory, each aligned.
  Unpacking(const layout::Shards& layout, std::vector<at::Tensor> leaves);

  /// Where large pieces go in the memory of the leaves if they are placed directly.
  const std::vector<transport::DirectPlacement::Range>& placements() const {
    return placements_;
  }
  int64_t placed_elements() const {
    return placed_;
  }
  /// Copies what was gathered into the leaves, whose memory is `memory`. `is_placed`: large pieces are there already,
  /// and `gathered` has only the others. Returns the number of bytes.
  int64_t run(const at::Tensor& gathered, const at::Tensor& memory, bool is_placed);

 private:
  /// A rank's piece of a leaf.
  struct Copy {
    size_t leaf;
    Runs runs;
    int64_t rank;
    /// Where it begins in the gathered parts.
    int64_t start;
    bool is_moved;
    /// Whether a gather with a placement puts it into its place directly; if not, where it begins in what is left.
    bool can_place = false;
    int64_t rest = 0;

    int64_t numel() const {
      return runs.count * runs.length;
    }
  };

  void find_placements(const layout::Shards& layout);
  void copy(const at::Tensor& gathered, const at::Tensor& memory, bool is_placed);

  std::vector<at::Tensor> leaves_;
  std::vector<Copy> copies_;
  std::vector<transport::DirectPlacement::Range> placements_;
  int64_t placed_ = 0;
  /// Bytes that are copied if nothing is placed directly.
  int64_t bytes_ = 0;
  /// Where the gathered buffer and the leaves are, and whether large pieces were placed directly. The pool hands out
  /// the same buffers again, so moves between them can be repeated.
  using Addresses = std::tuple<const void*, const void*, bool>;
  std::vector<std::pair<Addresses, CopyBatch>> known_moves_;
};

} // namespace shardwise::group
