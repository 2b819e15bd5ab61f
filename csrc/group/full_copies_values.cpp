#include "base/compute_guard.h"
#include "group/full_copies.h"
#include "group/pieces.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

namespace shardwise::group {

std::vector<at::Tensor> FullCopies::gather_values(
    const std::vector<bool>& wanted, std::optional<at::Device> device, const comm::Collectives& collectives,
    comm::Buffers& buffers, const std::string& unit, Counters& counters) const {
  const base::ComputeGuard guard;
  collect();
  // In the dtype of the shards, on the device of the full copies.
  const auto part = part_.to(kinds_.shards.device(kinds_.full.device()).pinned_memory(false));
  return gather_parts(part, wanted, device.value_or(part_.device()), collectives, buffers, unit, counters);
}

std::vector<at::Tensor> FullCopies::gather_pieces(
    const std::vector<at::Tensor>& pieces, bool keep, std::optional<at::Device> device,
    const comm::Collectives& collectives, comm::Buffers& buffers, const std::string& unit, Counters& counters) const {
  const base::ComputeGuard guard;
  std::vector<bool> wanted(pieces.size(), false);
  std::optional<at::ScalarType> dtype;
  for (size_t i = 0; i < pieces.size(); ++i) {
    if (!pieces[i].defined()) continue;
    wanted[i] = keep;
    dtype = dtype ? at::promoteTypes(*dtype, pieces[i].scalar_type()) : pieces[i].scalar_type();
  }
  if (!dtype) return std::vector<at::Tensor>(pieces.size());
  const auto part = at::zeros({layout_.part}, kinds_.full.dtype(dtype));
  for (size_t i = 0; i < pieces.size(); ++i) {
    if (pieces[i].defined()) piece_in(part, layout_.cuts[i], rank_, 0).copy_(pieces[i]);
  }
  auto values = gather_parts(part, wanted, device.value_or(part_.device()), collectives, buffers, unit, counters);
  for (size_t i = 0; i < pieces.size(); ++i) {
    if (values[i].defined()) values[i] = values[i].to(pieces[i].scalar_type());
  }
  return values;
}

std::vector<at::Tensor> FullCopies::gather_parts(
    const at::Tensor& part, const std::vector<bool>& wanted, at::Device device, const comm::Collectives& collectives,
    comm::Buffers& buffers, const std::string& unit, Counters& counters) const {
  const bool alone = layout_.world == 1;
  const auto gathered = alone ? part : buffers.take(layout_.world * layout_.part, part.options(), counters);
  if (!alone) collectives.all_gather(gathered, part, named(unit), counters).wait();
  std::vector<at::Tensor> values(parameters().size());
  for (size_t i = 0; i < values.size(); ++i) {
    if (!wanted[i]) continue;
    const auto& cut = layout_.cuts[i];
    values[i] = at::empty(parameters()[i]->full().sizes(), part.options().device(device));
    for (int64_t rank = 0; rank < layout_.world; ++rank) {
      if (cut.piece_numel(rank) == 0) continue;
      piece_of(values[i], cut, rank).copy_(piece_in(gathered, cut, rank, rank * layout_.part));
    }
  }
  if (!alone) buffers.give(gathered);
  return values;
}

at::Tensor FullCopies::piece_in_whole(size_t index, const at::Tensor& whole) const {
  const base::ComputeGuard guard;
  return piece_of(whole, layout_.cuts[index], rank_);
}

void FullCopies::store(size_t index, const at::Tensor& value) {
  store_piece(index, piece_in_whole(index, value));
}

void FullCopies::store_piece(size_t index, const at::Tensor& piece) {
  // A gather ahead may still read the shard.
  if (pending_) pending_->settle();
  let_host_write();
  // No ComputeGuard: autograd has to see that the shard's version moves, as that of any parameter that is loaded.
  const c10::AutoGradMode no_grad(false);
  auto shard = parameters()[index]->stored();
  shard.copy_(piece);
  mark_stale();
}

} // namespace shardwise::group
