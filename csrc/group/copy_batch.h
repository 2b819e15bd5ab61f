#pragma once

#include "kernels/moves.h"
#include "layout/shards.h"

#include <shardwise/detail/export.h>

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <vector>

// Small pieces on a CPU bypass the dispatcher: one call to it costs more than the piece itself. Large ones are left to
// torch's kernels, which use all threads. On a device for which we have kernels, all pieces are moved together.

namespace shardwise::group {

/// The elements of a contiguous tensor that a cut gives to a rank: `count` runs of `length` elements each, `stride`
/// apart, from `start` on.
struct Runs {
  int64_t count = 0;
  int64_t length = 0;
  int64_t stride = 0;
  int64_t start = 0;

  bool empty() const {
    return count == 0 || length == 0;
  }
};
SHARDWISE_API Runs runs_of(const layout::Cut& cut, int64_t rank);

/// Runs of a whole tensor, and their places in a vector: the first starts at element `offset`, each next one `apart`
/// elements later. 0: they are adjacent.
struct Piece {
  Runs runs;
  int64_t offset = 0;
  int64_t apart = 0;
};
/// Adds a piece, unless it is empty. A piece that continues the last one at the same distances is merged into it: a
/// thousand ranks with a row each make one piece.
SHARDWISE_API void add_piece(std::vector<Piece>& pieces, const Piece& piece);

/// Pieces that are moved together, by run(). What they are read from is kept alive until then.
class SHARDWISE_API CopyBatch {
 public:
  /// A tensor of more elements is large: torch's kernels use several threads for it.
  static constexpr int64_t kSmall = 32768;

  /// Whether pieces of this tensor are moved here: it is small and on a CPU, or on a device that has kernels.
  static bool takes(const at::Tensor& tensor);
  /// Whether scale() knows both dtypes.
  static bool scales(at::ScalarType from, at::ScalarType to);

  /// Adds pieces of `part` that go to their places in `whole`. Same dtype; both contiguous.
  void put(const at::Tensor& whole, c10::ArrayRef<Piece> pieces, const at::Tensor& part);
  /// Adds pieces of `whole` that go, multiplied by `factor`, to their places in `part`. The bits are those of at::mul
  /// on `whole` cast to the wider of the two dtypes, which must satisfy scales(). The memory of `whole` has no gaps,
  /// and the runs count its elements.
  void scale(const at::Tensor& whole, c10::ArrayRef<Piece> pieces, double factor, const at::Tensor& part);
  void run();
  /// Repeats the moves. All memory must still be at the same addresses, and nothing may be added any more.
  void run_again() const;
  /// Runs, and keeps the moves for run_again(), but no tensor. If the moves were of several kinds it keeps none, and
  /// returns false.
  bool run_and_keep();

 private:
  struct Kind {
    at::Device device = at::kCPU;
    at::ScalarType from = at::kFloat;
    at::ScalarType to = at::kFloat;
    /// Unset: elements are copied as they are.
    std::optional<double> factor = std::nullopt;
    bool operator==(const Kind&) const = default;
  };
  template <typename Add>
  void add(const Kind& kind, const at::Tensor& from, c10::ArrayRef<Piece> pieces, const Add& add);
  /// What is added next is of this kind, and is read from this tensor, which is kept alive until it has moved.
  void begin(const Kind& kind, const at::Tensor& from);

  Kind kind_;
  std::vector<kernels::Move> moves_;
  std::vector<at::Tensor> alive_;
  bool ran_before_ = false;
};

/// Writes the flags as 0 and 1 from element `offset` on, and again after each `stride` elements, as long as there are
/// some. Returns false for a dtype that it does not know.
SHARDWISE_API bool put_flags(const std::vector<bool>& flags, const at::Tensor& vector, int64_t offset, int64_t stride);

/// A view that is made without the dispatcher, of memory that autograd does not know.
SHARDWISE_API at::Tensor view_of(
    const at::Tensor& buffer, at::IntArrayRef sizes, at::IntArrayRef strides, int64_t offset);

} // namespace shardwise::group
