#include "group/copy_batch.h"

#include "group/data.h"

#include <c10/util/accumulate.h>

#include <algorithm>
#include <utility>

namespace shardwise::group {
namespace {

/// A function that gives the addresses of a tensor's elements, by their number in memory.
auto elements_of(const at::Tensor& tensor) {
  return [first = static_cast<char*>(tensor.mutable_data_ptr()),
          size = static_cast<int64_t>(tensor.itemsize())](int64_t index) { return first + index * size; };
}

} // namespace

bool CopyBatch::takes(const at::Tensor& tensor) {
  return is_plain(tensor) && kernels::has_kernels(tensor.device()) && (!tensor.is_cpu() || tensor.numel() <= kSmall);
}

bool CopyBatch::scales(at::ScalarType from, at::ScalarType to) {
  return kernels::can_scale(from) && kernels::can_scale(to);
}

Runs runs_of(const layout::Cut& cut, int64_t rank) {
  const auto dim = static_cast<size_t>(cut.dim);
  const auto row = c10::multiply_integers(cut.shape.begin() + cut.dim + 1, cut.shape.end());
  return {
      .count = c10::multiply_integers(cut.shape.begin(), cut.shape.begin() + cut.dim),
      .length = cut.length(rank) * row,
      .stride = cut.shape[dim] * row,
      .start = cut.starts[static_cast<size_t>(rank)] * row};
}

void add_piece(std::vector<Piece>& pieces, const Piece& piece) {
  if (piece.runs.empty()) return;
  if (!pieces.empty() && piece.runs.count == 1 && pieces.back().runs.length == piece.runs.length) {
    auto& [runs, offset, apart] = pieces.back();
    const auto in_whole = piece.runs.start - runs.start;
    const auto in_vector = piece.offset - offset;
    if (runs.count == 1) {
      runs.stride = in_whole;
      apart = in_vector;
    }
    if (in_whole == runs.count * runs.stride && in_vector == runs.count * apart) {
      ++runs.count;
      return;
    }
  }
  pieces.push_back(piece);
}

// begin() runs once for all pieces of a tensor: there is one for each rank, and there may be thousands of ranks.
template <typename Add>
void CopyBatch::add(const Kind& kind, const at::Tensor& from, c10::ArrayRef<Piece> pieces, const Add& add) {
  bool begun = false;
  for (const auto& piece : pieces) {
    if (piece.runs.empty()) continue;
    if (!std::exchange(begun, true)) begin(kind, from);
    add(piece.runs, piece.offset, piece.apart == 0 ? piece.runs.length : piece.apart);
  }
}

void CopyBatch::put(const at::Tensor& whole, c10::ArrayRef<Piece> pieces, const at::Tensor& part) {
  const auto from = elements_of(part);
  const auto to = elements_of(whole);
  const Kind kind{.device = whole.device(), .from = part.scalar_type(), .to = whole.scalar_type()};
  add(kind, part, pieces, [&](const Runs& runs, int64_t offset, int64_t apart) {
    moves_.push_back({from(offset), to(runs.start), runs.count, runs.length, apart, runs.stride});
  });
}

void CopyBatch::scale(const at::Tensor& whole, c10::ArrayRef<Piece> pieces, double factor, const at::Tensor& part) {
  const auto from = elements_of(whole);
  const auto to = elements_of(part);
  add({whole.device(), whole.scalar_type(), part.scalar_type(), factor}, whole, pieces,
      [&](const Runs& runs, int64_t offset, int64_t apart) {
        moves_.push_back({from(runs.start), to(offset), runs.count, runs.length, runs.stride, apart});
      });
}

void CopyBatch::begin(const Kind& kind, const at::Tensor& from) {
  if (!(kind == kind_)) run();
  kind_ = kind;
  if (alive_.empty() || !alive_.back().is_same(from)) alive_.push_back(from);
}

void CopyBatch::run() {
  run_again();
  ran_before_ = !moves_.empty();
  moves_.clear();
  alive_.clear();
}

void CopyBatch::run_again() const {
  if (moves_.empty()) return;
  if (kind_.factor) {
    kernels::scale(kind_.device, kind_.from, kind_.to, *kind_.factor, moves_);
  } else {
    kernels::copy(kind_.device, static_cast<int64_t>(c10::elementSize(kind_.from)), moves_);
  }
}

bool CopyBatch::run_and_keep() {
  if (ran_before_) {
    run();
    return false;
  }
  run_again();
  alive_.clear();
  return true;
}

bool put_flags(const std::vector<bool>& flags, const at::Tensor& vector, int64_t offset, int64_t stride) {
  if (vector.scalar_type() != at::kFloat) return false;
  auto* const first = vector.mutable_data_ptr<float>() + offset;
  std::transform(flags.begin(), flags.end(), first, [](bool flag) { return flag ? 1.0F : 0.0F; });
  for (auto at = stride; offset + at < vector.numel(); at += stride) std::copy_n(first, flags.size(), first + at);
  return true;
}

at::Tensor view_of(const at::Tensor& buffer, at::IntArrayRef sizes, at::IntArrayRef strides, int64_t offset) {
  auto view = at::detail::make_tensor<c10::TensorImpl>(
      c10::TensorImpl::VIEW, c10::Storage(buffer.storage()), buffer.key_set(), buffer.dtype());
  view.unsafeGetTensorImpl()->set_storage_offset(offset);
  view.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides);
  return view;
}

} // namespace shardwise::group
