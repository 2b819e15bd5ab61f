#include "group/full_copies.h"

#include "base/compute_guard.h"
#include "group/data.h"
#include "group/pieces.h"
#include "transport/transport.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/util/StringUtil.h>

namespace shardwise::group {

FullCopies::FullCopies(std::vector<Parameter*> parameters, Setting setting, FrontEndCallbacks& front)
    : Copies(std::move(parameters)),
      layout_(std::move(setting.layout)),
      is_flat_(setting.is_flat),
      rank_(setting.rank),
      kinds_(setting.kinds),
      part_(this->parameters(), layout_, rank_, kinds_.shards, setting.takes_memory, front) {
  if (const auto* before = setting.before; before != nullptr && lies_as(*before)) {
    take_storages(*before, front);
  } else {
    is_flat_ ? make_flat(front) : make_rows(front);
    name_storages(front);
    for (auto& storage : storages_) storage.free();
  }
}

// A gather may be under way: then its memory is in use on another stream.
FullCopies::~FullCopies() {
  FullCopies::await_gather();
}

void FullCopies::name_storages(const FrontEndCallbacks& front) {
  std::vector<std::string> names;
  for (const auto* parameter : parameters()) names.push_back("'" + parameter->name() + "'");
  if (is_flat_) names = {c10::Join(", ", names)};
  for (size_t i = 0; i < storages_.size(); ++i) {
    if (const auto text = front.read_error(names[i]); !text.empty()) storages_[i].set_read_error(text);
  }
}

void FullCopies::mark_stale() {
  if (current()) {
    for (auto& storage : storages_) storage.expire();
  }
  Copies::mark_stale();
}

std::optional<size_t> FullCopies::index_of(const at::Tensor& tensor) const {
  const auto* storage = tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
  std::optional<size_t> found;
  if (!is_flat_) {
    for (size_t i = 0; i < storages_.size() && !found; ++i) {
      if (storages_[i].storage() == storage) found = i;
    }
  } else if (storages_.front().storage() == storage) {
    for (size_t i = 0; i < starts_.size(); ++i) {
      const bool is_before = starts_[i] <= tensor.storage_offset();
      // A leaf without elements begins where the next one does.
      if (is_before && (!found || starts_[i] >= starts_[*found])) found = i;
    }
  }
  return found;
}

bool FullCopies::serves(const at::Tensor& tensor) const {
  if (!current()) return false;
  const auto index = index_of(tensor);
  if (!index || !part_.fits(*index)) return false;
  const auto* parameter = parameters()[*index];
  return parameter->requires_grad() == parameter->leaf_requires_grad();
}

void FullCopies::provide(
    bool from_held, bool may_hold, const comm::Collectives& collectives, comm::Buffers& buffers, Counters& counters) {
  from_held_ = from_held && collectives.size() * held_.numel() == layout_.world * layout_.part;
  if (!from_held_) {
    drop_held(buffers);
    counters.unsharded_bytes += part_.collect();
  }
  places_directly_ = !may_hold && !unpacking_.placements().empty() && collectives.can_place();
  if (gathers_into_leaves()) refill(collectives.memory(), buffers, counters);
  if (gathers_apart()) {
    gathered_ = buffers.take(gathered_apart(), kinds_.full, counters, collectives.memory());
  } else if (places_directly_) {
    gathered_ = view_of(memory_, {0}, {1}, 0);
  } else if (layout_.world == 1 && !lies_on_full_device()) {
    gathered_ = send(buffers, counters);
  } else {
    gathered_ = gathers_into_leaves() ? memory_ : part_.vector();
  }
}

void FullCopies::start(
    const comm::Collectives& collectives, comm::Buffers& buffers, const std::string& unit, Counters& counters) {
  if (layout_.world == 1) return;
  auto part = from_held_ ? held_ : part_.vector();
  if (collectives.memory() != nullptr) {
    part = put_in_place(part, collectives, counters);
  } else if (!from_held_ && !is_sent_as_it_is()) {
    part = send(buffers, counters);
  }
  std::optional<comm::SideStream::Scope> scope;
  if (!from_held_ && !lies_on_full_device()) scope.emplace(from_host_, gathered_.device());
  const transport::DirectPlacement placement{memory_, unpacking_.placements()};
  pending_ = collectives.all_gather(gathered_, part, named(unit), counters, places_directly_ ? &placement : nullptr);
  if (scope) begun_.note(gathered_);
}

// The part as it is sent: cast, and on the device of the full copies. In the layout `flat`, with one rank, it goes
// straight into the full copies.
at::Tensor FullCopies::send(comm::Buffers& buffers, Counters& counters) {
  const bool is_whole = is_flat_ && layout_.world == 1;
  const auto sent = is_whole ? memory_ : buffers.take(layout_.part, kinds_.full, counters);
  put(part_.vector(), sent, counters);
  if (!is_whole) sent_ = sent;
  return sent;
}

// Puts what this rank sends in its place in the gathered buffer: so both are in the process group's memory.
at::Tensor FullCopies::put_in_place(const at::Tensor& part, const comm::Collectives& collectives, Counters& counters) {
  const auto place = gathered_.narrow(0, collectives.rank() * part.numel(), part.numel());
  put(part, place, counters);
  return place;
}

void FullCopies::put(const at::Tensor& part, const at::Tensor& place, Counters& counters) {
  counters.unsharded_bytes += static_cast<int64_t>(place.nbytes());
  std::optional<comm::SideStream::Scope> scope;
  if (part.device() != place.device()) {
    from_host_.follow_current(place.device());
    scope.emplace(from_host_, place.device());
  }
  place.copy_(part, /*non_blocking=*/true);
  if (!scope) return;
  part_.note_read(place);
  begun_.note(place);
}

void FullCopies::await_gather() {
  if (!lies_on_full_device() && gathered_.defined()) begun_.await(gathered_);
}

// All leaves share one piece of memory, so that the pool keeps few pieces. It may have been kept, or be out of date.
void FullCopies::refill(const comm::Collectives* owner, comm::Buffers& buffers, Counters& counters) {
  auto numel = layout_.world * layout_.part;
  if (!is_flat_) {
    size_t bytes = 0;
    for (const auto& storage : storages_) bytes += layout::aligned(storage.bytes());
    numel = static_cast<int64_t>(bytes / kinds_.full.dtype().itemsize());
  }
  if (memory_.defined() && memory_.numel() < numel) {
    free_leaves();
    buffers.give(std::exchange(memory_, at::Tensor()));
  }
  if (!memory_.defined()) memory_ = buffers.take(numel, kinds_.full, counters, is_flat_ ? owner : nullptr);
  are_shared_ = transport::is_shared(memory_);
  size_t offset = 0;
  for (auto& storage : storages_) {
    storage.refill(memory_, offset);
    offset += layout::aligned(storage.bytes());
  }
}

void FullCopies::refuse_in_child() {
  part_.refuse_in_child();
  if (!are_shared_) return;
  for (auto& storage : storages_) {
    if (!storage.freed()) storage.refuse_in_child();
  }
}

void FullCopies::hold(int64_t holders, comm::Buffers& buffers, Counters& counters) {
  if (held_.defined() || holders == 1) return;
  const auto numel = layout_.world / holders * layout_.part;
  held_ = buffers.take(numel, gathered_.options(), counters);
  held_.copy_(gathered_.narrow(0, rank_ % holders * numel, numel));
}

void FullCopies::drop_held(comm::Buffers& buffers) {
  buffers.give(std::exchange(held_, at::Tensor()));
}

void FullCopies::copy_out(int64_t holders, comm::Buffers& buffers, Counters& counters) {
  const base::ComputeGuard compute;
  // Not earlier, unless the gather writes there: until here the unit needs only the gathered buffer.
  if (!gathers_into_leaves()) refill(nullptr, buffers, counters);
  if (!is_flat_) {
    counters.unsharded_bytes += unpacking_.run(gathered_, memory_, places_directly_);
  } else if (layout_.world == 1 && lies_on_full_device()) {
    gathered_.copy_(part_.vector());
  }
  if (!written()) hold(holders, buffers, counters);
}

FullCopies::Sizes FullCopies::sizes() const {
  const auto own = static_cast<int64_t>(kinds_.shards.dtype().itemsize());
  const auto compute = static_cast<int64_t>(kinds_.full.dtype().itemsize());
  int64_t full = 0;
  for (const auto& storage : storages_) full += static_cast<int64_t>(storage.bytes());
  return {
      .part = layout_.part * own,
      .padding = (layout_.part - part_.elements()) * own,
      .sent = layout_.part * compute,
      .full = full,
      .dtype = kinds_.full.dtype().toScalarType()};
}

const Parameter* FullCopies::find(const at::Tensor& tensor) const {
  const auto index = index_of(tensor);
  return index ? parameters()[*index] : nullptr;
}

bool FullCopies::take_memory(FrontEndCallbacks& front) {
  if (!part_.take_all(front)) return false;
  mark_stale();
  return true;
}

void FullCopies::make_rows(FrontEndCallbacks& front) {
  std::vector<at::Tensor> aliases;
  for (const auto& parameter : parameters()) {
    const auto leaf = parameter->full();
    {
      const base::ComputeGuard guard;
      const auto& alias = aliases.emplace_back(storages_.emplace_back(leaf.sizes(), kinds_.full).alias());
      replace_data(leaf, alias);
      parameter->keep_memory(alias);
    }
    front.mark(leaf);
    parameter->set_absent_gradient(front.absent_gradient(leaf));
    watches_.push_back(front.watch(leaf, FrontEndCallbacks::Role::full));
  }
  const base::ComputeGuard guard;
  unpacking_ = Unpacking(layout_, std::move(aliases));
}

void FullCopies::make_flat(FrontEndCallbacks& front) {
  const auto& whole = storages_.emplace_back(std::vector<int64_t>{layout_.world * layout_.part}, kinds_.full).alias();
  for (size_t i = 0; i < parameters().size(); ++i) {
    const auto& cut = layout_.cuts[i];
    const auto leaf = parameters()[i]->full();
    int64_t rank = 0;
    while (rank + 1 < layout_.world && cut.length(rank) == 0) ++rank;
    {
      const base::ComputeGuard guard;
      const auto start = rank * layout_.part + cut.offsets[rank];
      starts_.push_back(cut.shape[0] == 0 ? 0 : start);
      const auto memory = whole.narrow(0, starts_.back(), cut.shape[0]).view(leaf.sizes());
      replace_data(leaf, memory);
      parameters()[i]->keep_memory(memory);
    }
    front.mark(leaf);
    parameters()[i]->set_absent_gradient(front.absent_gradient(leaf));
  }
  watches_.push_back(front.watch(whole, FrontEndCallbacks::Role::full));
}

bool FullCopies::lies_as(const FullCopies& before) const {
  const auto alike = [](const at::TensorOptions& a, const at::TensorOptions& b) {
    return a.dtype() == b.dtype() && a.device() == b.device();
  };
  if (parameters() != before.parameters() || layout_.part != before.layout_.part || is_flat_ != before.is_flat_ ||
      !alike(kinds_.full, before.kinds_.full)) {
    return false;
  }
  for (size_t i = 0; i < parameters().size(); ++i) {
    const auto& storage = before.storages_[is_flat_ ? 0 : i];
    if (parameters()[i]->live_full().unsafe_storage().unsafeGetStorageImpl() != storage.storage()) return false;
  }
  return true;
}

// With the same storages, views of the leaves that an operation is about to read, or that autograd saved, stay valid.
void FullCopies::take_storages(const FullCopies& before, FrontEndCallbacks& front) {
  storages_ = before.storages_;
  starts_ = before.starts_;
  unpacking_ = before.unpacking_;
  for (size_t i = 0; i < parameters().size(); ++i) {
    const auto leaf = parameters()[i]->full();
    front.mark(leaf);
    if (i < storages_.size()) watches_.push_back(front.watch(leaf, FrontEndCallbacks::Role::full));
  }
}

std::vector<at::Tensor> FullCopies::gather_values(
    const std::vector<bool>& wanted, std::optional<at::Device> device, const comm::Collectives& collectives,
    comm::Buffers& buffers, const std::string& unit, Counters& counters) const {
  const base::ComputeGuard guard;
  part_.collect();
  // In the dtype of the shards, on the device of the full copies.
  const auto part = part_.vector().to(kinds_.shards.device(kinds_.full.device()).pinned_memory(false));
  return gather_parts(part, wanted, device.value_or(part_.vector().device()), collectives, buffers, unit, counters);
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
  auto values =
      gather_parts(part, wanted, device.value_or(part_.vector().device()), collectives, buffers, unit, counters);
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
  if (pending_) pending_->wait_noexcept();
  let_host_write();
  // No ComputeGuard: autograd has to see that the shard's version moves, as for any parameter that is loaded.
  const c10::AutoGradMode no_grad(false);
  auto shard = parameters()[index]->stored();
  shard.copy_(piece);
  mark_stale();
}

} // namespace shardwise::group
