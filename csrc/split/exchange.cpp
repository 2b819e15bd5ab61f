#include "split/exchange.h"

#include "base/compute_guard.h"

#include <shardwise/error.h>

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <c10/util/StringUtil.h>

#include <algorithm>

namespace shardwise::split {

std::string Exchange::name(const char* what) const {
  return c10::str(what, " of '", parameter_->name, "' along axis '", parameter_->axis->name, "'");
}

comm::CollectiveName Exchange::lazy_name(const char* what) const {
  return [exchange = *this, what] { return exchange.name(what); };
}

comm::Pending Exchange::start_sum(const at::Tensor& tensor, const char* what) const {
  const auto& axis = *parameter_->axis;
  return axis.ranks.all_reduce(tensor, lazy_name(what), axis.counters);
}

at::Tensor Exchange::sum(const at::Tensor& tensor, const char* what) const {
  const base::ComputeGuard guard;
  auto values = tensor.detach().contiguous();
  if (size() > 1 && values.numel() > 0) start_sum(values, what).wait();
  return values;
}

void Exchange::require_parts(const at::Tensor& whole, int64_t dim, const char* what) const {
  if (dim < whole.dim() && whole.size(dim) % size() == 0) return;
  const auto& axis = *parameter_->axis;
  throw ValueError(c10::str(
      "shardwise: rank ", axis.mesh.rank(), ": ", name(what), ": activations of sizes ", whole.sizes(),
      " cannot be divided along dimension ", dim, ", the sequence_dim, into ", size(),
      " parts of equal size. Pad the sequence, or leave sequence_dim out."));
}

at::Tensor Exchange::Scattering::wait() {
  pending.wait();
  const base::ComputeGuard guard;
  return dim == 0 ? output : output.transpose(0, dim);
}

Exchange::Scattering Exchange::start_scatter_sum(const at::Tensor& tensor, int64_t dim, const char* what) const {
  require_parts(tensor, dim, what);
  const base::ComputeGuard guard;
  const auto& axis = *parameter_->axis;
  const auto rows = tensor.detach().transpose(0, dim).contiguous();
  auto sizes = rows.sizes().vec();
  sizes[0] /= size();
  auto output = size() > 1 ? at::empty(sizes, rows.options()) : rows;
  if (size() == 1 || rows.numel() == 0) return {rows, output, dim, {nullptr, what, axis.rank()}};
  auto pending = axis.ranks.reduce_scatter(output, rows, lazy_name(what), axis.counters);
  return {rows, std::move(output), dim, std::move(pending)};
}

at::Tensor Exchange::scatter_sum(const at::Tensor& tensor, int64_t dim, const char* what) const {
  const auto output = start_scatter_sum(tensor, dim, what).wait();
  const base::ComputeGuard guard;
  return output.contiguous();
}

at::Tensor Exchange::gather_rows(const at::Tensor& rows, const char* what) const {
  const auto& axis = *parameter_->axis;
  if (size() == 1) return rows;
  auto sizes = rows.sizes().vec();
  sizes[0] *= size();
  const auto all = at::empty(sizes, rows.options());
  if (all.numel() == 0) return all;
  axis.ranks.all_gather(all, rows, lazy_name(what), axis.counters).wait();
  return all;
}

at::Tensor Exchange::gather(const at::Tensor& part, int64_t dim, const char* what) const {
  const base::ComputeGuard guard;
  return gather_rows(part.detach().transpose(0, dim).contiguous(), what).transpose(0, dim).contiguous();
}

at::Tensor Exchange::gather(
    const at::Tensor& piece, int64_t dim, const layout::AxisPieces& pieces, const char* what) const {
  const base::ComputeGuard guard;
  int64_t longest = 0;
  for (int64_t rank = 0; rank < size(); ++rank) longest = std::max(longest, pieces.length(rank));
  auto rows = piece.detach().transpose(0, dim).contiguous();
  if (rows.size(0) < longest) {
    auto sizes = rows.sizes().vec();
    sizes[0] = longest;
    const auto padded = at::empty(sizes, rows.options());
    padded.narrow(0, 0, rows.size(0)).copy_(rows);
    rows = padded;
  }
  const auto all = gather_rows(rows, what);
  std::vector<std::pair<int64_t, at::Tensor>> found;
  for (int64_t rank = 0; rank < size(); ++rank) {
    auto start = rank * longest;
    for (const auto& range : pieces.ranges(rank)) {
      if (range.length > 0) found.emplace_back(range.start, all.narrow(0, start, range.length));
      start += range.length;
    }
  }
  std::sort(found.begin(), found.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
  std::vector<at::Tensor> ordered;
  for (const auto& [start, values] : found) ordered.push_back(values.transpose(0, dim));
  return (ordered.empty() ? all.transpose(0, dim) : at::cat(ordered, dim)).contiguous();
}

at::Tensor piece_of(const at::Tensor& whole, int64_t dim, const layout::AxisPieces& pieces, int64_t rank) {
  const auto ranges = pieces.ranges(rank);
  if (ranges.size() == 1) return whole.narrow(dim, ranges[0].start, ranges[0].length);
  std::vector<at::Tensor> some;
  for (const auto& range : ranges) some.push_back(whole.narrow(dim, range.start, range.length));
  return at::cat(some, dim);
}

at::Tensor Exchange::own(const at::Tensor& whole, int64_t dim, const layout::AxisPieces& pieces) const {
  const base::ComputeGuard guard;
  return piece_of(whole.detach(), dim, pieces, parameter_->axis->rank());
}

} // namespace shardwise::split
