#pragma once

#include "cuda/moves.h"
#include "layout/shards.h"

#include <shardwise/export.h>

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <vector>

// Small pieces on a CPU are moved without the dispatcher: one call of it costs more than the piece itself. Large ones
// are left to torch's kernels, which use all threads. On a device with kernels of ours all pieces are moved together.

namespace shardwise::group {

/// The elements of a contiguous tensor that a cut gives to a rank: runs at equal distances.
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

/// A rank's runs, and at which element of a vector of pieces they stand one after another.
struct Piece {
  Runs runs;
  int64_t offset = 0;
};

/// Pieces that are moved together, by run(). Their tensors live until then.
class SHARDWISE_API CopyBatch {
 public:
  /// Whether pieces of a tensor are moved here: where its elements lie on a CPU and are few, or on a device that has
  /// kernels.
  static bool takes(const at::Tensor& tensor);
  /// Whether scale() knows both dtypes.
  static bool scales(at::ScalarType from, at::ScalarType to);

  /// A piece, which lies at element `offset` of `part`, goes to its place in `whole`. Same dtype; both contiguous.
  void put(const at::Tensor& whole, const Runs& runs, const at::Tensor& part, int64_t offset);
  /// Pieces of `whole`, multiplied, go to their places in `part`, with the bits that at::mul gives when `whole` is first
  /// cast to the wider of the two dtypes, which are such that scales(). The memory of `whole` is without gaps, and the
  /// runs are of that memory.
  void scale(const at::Tensor& whole, c10::ArrayRef<Piece> pieces, double factor, const at::Tensor& part);
  void run();
  /// Moves the same once more, later: for whoever knows that everything lies where it lay. Nothing may be added then.
  void run_again() const;
  /// Runs, and keeps the moves for run_again(), but no tensor. Returns false, and keeps none, where they were of
  /// several kinds.
  bool run_and_keep();

 private:
  struct Kind {
    at::Device device = at::kCPU;
    at::ScalarType from = at::kFloat;
    at::ScalarType to = at::kFloat;
    /// Unset: bits are copied.
    std::optional<double> factor = std::nullopt;
    bool operator==(const Kind&) const = default;
  };
  /// What is added next is of this kind, and of this tensor, which lives until it has moved.
  void begin(const Kind& kind, const at::Tensor& from);

  Kind kind_;
  std::vector<cuda::Move> moves_;
  std::vector<at::Tensor> alive_;
  bool ran_before_ = false;
};

/// Writes 0 and 1 at element `offset` and those after it. Returns false for a dtype that it does not know.
SHARDWISE_API bool put_flags(const std::vector<bool>& flags, const at::Tensor& vector, int64_t offset);

/// A view that is made without the dispatcher, for memory that autograd does not know.
SHARDWISE_API at::Tensor view_of(
    const at::Tensor& buffer, at::IntArrayRef sizes, at::IntArrayRef strides, int64_t offset);

} // namespace shardwise::group
