#include "group/full_copies.h"

#include "base/compute_guard.h"
#include "group/data.h"
#include "group/pieces.h"
#include "transport/transport.h"

#include <shardwise/error.h>

#include <ATen/ops/detach.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/util/StringUtil.h>
#include <c10/util/accumulate.h>

#include <algorithm>

namespace shardwise::group {
namespace {

/// How many sets of moves are kept. A unit gets the same few pairs of buffers: those of its own turn, and those that it
/// gets when others were gathered ahead.
constexpr size_t kMostPlaces = 4;

/// This rank's piece of what is in the registry: all of that, or a piece of it if a whole parameter was loaded there.
at::Tensor own_piece(const Parameter& parameter, const layout::Cut& cut, int64_t rank) {
  auto shard = parameter.stored();
  if (shard.sizes() == cut.piece_sizes(rank)) return shard;
  const auto whole = parameter.full().sizes();
  if (shard.sizes() == whole) return piece_of(shard, cut, rank);
  throw Error(c10::str(
      "shardwise: rank ", rank, ": the parameter '", parameter.name(), "' was replaced by a tensor of sizes ",
      shard.sizes(), ". It must have the sizes of this rank's shard, ", at::IntArrayRef(cut.piece_sizes(rank)),
      ", or of the whole parameter, ", whole,
      ". Load an archive that the same model saved on the same number of ranks."));
}

const void* first_element(const at::TensorImpl& tensor, size_t itemsize) {
  return static_cast<const char*>(tensor.unsafe_storage().data()) +
         tensor.storage_offset() * static_cast<int64_t>(itemsize);
}

} // namespace

FullCopies::FullCopies(std::vector<Parameter*> parameters, Setting setting, FrontEndCallbacks& front)
    : Copies(std::move(parameters)),
      layout_(std::move(setting.layout)),
      is_flat_(setting.is_flat),
      rank_(setting.rank),
      kinds_(setting.kinds),
      itemsize_(setting.kinds.shards.dtype().itemsize()) {
  adopt_shards(front, setting.takes_memory);
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
  for (const auto* parameter : parameters()) names.push_back(c10::str("'", parameter->name(), "'"));
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
  if (!index || !fits(*index)) return false;
  const auto* parameter = parameters()[*index];
  return parameter->requires_grad() == parameter->leaf_requires_grad();
}

void FullCopies::provide(
    bool from_held, bool may_hold, const comm::Collectives& collectives, comm::Buffers& buffers, Counters& counters) {
  from_held_ = from_held && collectives.size() * held_.numel() == layout_.world * layout_.part;
  if (!from_held_) {
    drop_held(buffers);
    counters.unsharded_bytes += collect();
  }
  places_directly_ = !may_hold && !placements_.empty() && collectives.can_place();
  if (gathers_into_leaves()) refill(collectives.memory(), buffers, counters);
  if (gathers_apart()) {
    gathered_ = buffers.take(layout_.world * layout_.part, kinds_.full, counters, collectives.memory());
  } else if (layout_.world == 1 && !lies_on_full_device()) {
    gathered_ = send(buffers, counters);
  } else {
    gathered_ = gathers_into_leaves() ? memory_ : part_;
  }
}

void FullCopies::start(
    const comm::Collectives& collectives, comm::Buffers& buffers, const std::string& unit, Counters& counters) {
  if (layout_.world == 1) return;
  auto part = from_held_ ? held_ : part_;
  if (collectives.memory() != nullptr) {
    part = put_in_place(part, collectives, counters);
  } else if (!from_held_ && !is_sent_as_it_is()) {
    part = send(buffers, counters);
  }
  std::optional<comm::SideStream::Scope> scope;
  if (!from_held_ && !lies_on_full_device()) scope.emplace(from_host_, gathered_.device());
  if (places_directly_) {
    // Nothing arrives in the output itself.
    const auto output = view_of(memory_, {layout_.world * layout_.part}, {1}, 0);
    const transport::DirectPlacement placement{memory_, placements_};
    pending_ = collectives.all_gather(output, part, named(unit), counters, &placement);
  } else {
    pending_ = collectives.all_gather(gathered_, part, named(unit), counters);
  }
  if (scope) begun_.note(gathered_);
}

// The part as it is sent: cast, and on the device of the full copies. In the layout `flat`, with one rank, it goes
// straight into the full copies.
at::Tensor FullCopies::send(comm::Buffers& buffers, Counters& counters) {
  const bool is_whole = is_flat_ && layout_.world == 1;
  const auto sent = is_whole ? memory_ : buffers.take(layout_.part, kinds_.full, counters);
  put(part_, sent, counters);
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
  host_read_.note(place);
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
    const auto leaves = static_cast<int64_t>(bytes / kinds_.full.dtype().itemsize());
    numel = places_directly_ ? with_rest(leaves, numel, placed_) : leaves;
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
  for (size_t i = 0; i < seen_.size() && part_is_shared_; ++i) {
    if (!seen_[i].elsewhere.defined()) transport::refuse_in_child(*seen_[i].storage.unsafeGetStorageImpl());
  }
  if (!are_shared_) return;
  for (auto& storage : storages_) {
    if (!storage.freed()) storage.refuse_in_child();
  }
}

void FullCopies::copy_pieces() {
  if (is_flat_) {
    if (layout_.world == 1 && lies_on_full_device()) gathered_.copy_(part_);
    return;
  }
  const Addresses addresses{gathered_.const_data_ptr(), memory_.const_data_ptr(), places_directly_};
  for (const auto& [known, moves] : known_moves_) {
    if (known == addresses) return moves.run_again();
  }
  CopyBatch moves;
  const bool alike = gathered_.dtype() == kinds_.full.dtype() && gathered_.device() == kinds_.full.device();
  bool moves_all = true;
  std::vector<Piece> pieces;
  for (size_t i = 0; i < copies_.size(); ++i) {
    const auto& copy = copies_[i];
    const auto start = places_directly_ ? copy.rest : copy.rank * layout_.part + copy.offset;
    if (places_directly_ && copy.can_place) {
      // It is there already.
    } else if (alike && copy.is_moved) {
      add_piece(pieces, {copy.runs, start});
    } else {
      moves_all = false;
      auto rows = copy.rows;
      rows.copy_(gathered_.narrow(0, start, rows.numel()).view(rows.sizes()));
    }
    if (i + 1 < copies_.size() && copies_[i + 1].leaf == copy.leaf) continue;
    if (!pieces.empty()) moves.put(storages_[copy.leaf].alias(), std::exchange(pieces, {}), gathered_);
  }
  if (!moves.run_and_keep() || !moves_all) return;
  if (known_moves_.size() == kMostPlaces) known_moves_.erase(known_moves_.begin());
  known_moves_.emplace_back(addresses, std::move(moves));
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
  copy_pieces();
  const auto placed = places_directly_ ? placed_ * static_cast<int64_t>(kinds_.full.dtype().itemsize()) : 0;
  counters.unsharded_bytes += copied_bytes_ - placed;
  if (!written()) hold(holders, buffers, counters);
}

FullCopies::Sizes FullCopies::sizes() const {
  const auto own = static_cast<int64_t>(part_.itemsize());
  const auto compute = static_cast<int64_t>(kinds_.full.dtype().itemsize());
  int64_t elements = 0;
  for (const auto& shard : seen_) elements += shard.numel;
  int64_t full = 0;
  for (const auto& storage : storages_) full += static_cast<int64_t>(storage.bytes());
  return {
      .part = layout_.part * own,
      .padding = (layout_.part - elements) * own,
      .sent = layout_.part * compute,
      .full = full,
      .dtype = kinds_.full.dtype().toScalarType()};
}

const Parameter* FullCopies::find(const at::Tensor& tensor) const {
  const auto* memory = tensor.storage().unsafeGetStorageImpl();
  const Parameter* last = nullptr;
  for (const auto* parameter : parameters()) {
    if (!parameter->alive()) continue;
    const auto leaf = parameter->full();
    if (leaf.storage().unsafeGetStorageImpl() == memory && leaf.storage_offset() <= tensor.storage_offset()) {
      last = parameter;
    }
  }
  return last;
}

void FullCopies::adopt_shards(FrontEndCallbacks& front, bool takes_memory) {
  {
    const base::ComputeGuard guard;
    part_ = transport::shared_zeros(layout_.part, kinds_.shards);
    part_is_shared_ = transport::is_shared(part_);
  }
  for (const auto& cut : layout_.cuts) seen_.push_back({cut.piece_numel(rank_), nullptr, {}, {}});
  for (size_t i = 0; i < parameters().size(); ++i) {
    const auto shard = parameters()[i]->stored();
    const bool is_piece = shard.sizes() == layout_.cuts[i].piece_sizes(rank_);
    if (takes_memory || !is_piece || part_.is_meta() || !is_alike(*shard.unsafeGetTensorImpl(), i)) {
      move_into_part(i, front);
    } else {
      leave_where_it_is(i, front);
    }
  }
  watches_.push_back(front.watch(part_, FrontEndCallbacks::Role::shard));
}

at::Tensor FullCopies::own_part(size_t index) const {
  return piece_in(part_, layout_.cuts[index], rank_, 0);
}

void FullCopies::move_into_part(size_t index, FrontEndCallbacks& front) {
  const auto shard = parameters()[index]->stored();
  {
    const base::ComputeGuard guard;
    host_read_.make_host_wait();
    auto piece = own_part(index);
    piece.copy_(own_piece(*parameters()[index], layout_.cuts[index], rank_));
    replace_data(shard, front.shown(piece));
  }
  seen_[index].elsewhere = at::Tensor();
  saw(index, shard);
  front.mark(shard);
}

void FullCopies::leave_where_it_is(size_t index, FrontEndCallbacks& front) {
  const auto shard = parameters()[index]->stored();
  {
    const base::ComputeGuard guard;
    seen_[index].elsewhere = shard.detach();
  }
  saw(index, shard);
  front.mark(shard);
  watches_.push_back(front.watch(shard, FrontEndCallbacks::Role::shard));
}

// Copies shards that are elsewhere into the part, which is sent. Returns the number of bytes.
int64_t FullCopies::collect() const {
  int64_t bytes = 0;
  for (size_t i = 0; i < seen_.size(); ++i) {
    const auto& shard = seen_[i].elsewhere;
    if (!shard.defined()) continue;
    host_read_.make_host_wait();
    own_part(i).copy_(shard);
    bytes += static_cast<int64_t>(shard.nbytes());
  }
  return bytes;
}

bool FullCopies::has_memory() const {
  return std::none_of(seen_.begin(), seen_.end(), [](const auto& shard) { return shard.elsewhere.defined(); });
}

bool FullCopies::take_memory(FrontEndCallbacks& front) {
  for (size_t i = 0; i < parameters().size(); ++i) {
    const auto* shard = parameters()[i]->live_shard();
    if (shard == nullptr || parameters()[i]->extension() || !is_alike(*shard, i)) return false;
  }
  for (size_t i = 0; i < parameters().size(); ++i) {
    if (seen_[i].elsewhere.defined() || !fits(i)) move_into_part(i, front);
  }
  mark_stale();
  return true;
}

bool FullCopies::fits() const {
  for (size_t i = 0; i < parameters().size(); ++i) {
    if (!fits(i)) return false;
  }
  return true;
}

bool FullCopies::is_alike(const at::TensorImpl& shard, size_t index) const {
  const auto* part = part_.unsafeGetTensorImpl();
  return shard.has_storage() && shard.dtype() == part->dtype() && shard.device() == part->device() &&
         shard.numel() == seen_[index].numel;
}

void FullCopies::saw(size_t index, const at::Tensor& shard) {
  seen_[index].storage = shard.storage();
  seen_[index].address = first_element(*shard.unsafeGetTensorImpl(), itemsize_);
}

// Called very often. A shard with elements is identified by their address, not by its storage: a front end may show it
// through another storage (FrontEndCallbacks::shown).
bool FullCopies::fits(size_t index) const {
  const auto* parameter = parameters()[index];
  const auto* shard = parameter->live_shard();
  const auto& seen = seen_[index];
  if (shard == nullptr || parameter->extension() || !shard->unsafe_storage() || shard->dtype() != part_.dtype() ||
      shard->numel() != seen.numel) {
    return false;
  }
  if (part_.is_meta()) return shard->is_meta();
  if (seen.numel == 0) return shard->unsafe_storage().unsafeGetStorageImpl() == seen.storage.unsafeGetStorageImpl();
  return first_element(*shard, itemsize_) == seen.address;
}

void FullCopies::make_rows(FrontEndCallbacks& front) {
  for (size_t i = 0; i < parameters().size(); ++i) {
    const auto& cut = layout_.cuts[i];
    const auto leaf = parameters()[i]->full();
    {
      const base::ComputeGuard guard;
      storages_.emplace_back(leaf.sizes(), kinds_.full);
      const auto& alias = storages_.back().alias();
      replace_data(leaf, alias);
      parameters()[i]->keep_memory(alias);
      for (int64_t rank = 0; rank < layout_.world; ++rank) {
        if (cut.piece_numel(rank) == 0) continue;
        auto rows = piece_of(alias, cut, rank);
        copied_bytes_ += static_cast<int64_t>(rows.nbytes());
        copies_.push_back({i, std::move(rows), runs_of(cut, rank), rank, cut.offsets[rank], CopyBatch::takes(alias)});
      }
    }
    front.mark(leaf);
    parameters()[i]->set_absent_gradient(front.absent_gradient(leaf));
    watches_.push_back(front.watch(leaf, FrontEndCallbacks::Role::full));
  }
  find_placements();
}

// Large pieces in one run that CopyBatch leaves to torch.
bool FullCopies::can_place(const layout::Cut& cut, int64_t rank, at::ScalarType dtype) {
  const auto runs = runs_of(cut, rank);
  return c10::multiply_integers(cut.shape) > CopyBatch::kSmall && runs.count == 1 &&
         static_cast<size_t>(runs.length) * c10::elementSize(dtype) >= transport::DirectPlacement::kLeast;
}

void FullCopies::find_placements() {
  if (layout_.world == 1 || !kinds_.full.device().is_cpu()) return;
  std::vector<size_t> starts;
  size_t start = 0;
  for (const auto& storage : storages_) {
    starts.push_back(start);
    start += layout::aligned(storage.bytes());
  }
  const auto item = kinds_.full.dtype().itemsize();
  const auto begin_of = [&](const Copy& copy) {
    return static_cast<size_t>(copy.rank * layout_.part + copy.offset) * item;
  };
  std::vector<transport::DirectPlacement::Range> large;
  for (auto& copy : copies_) {
    copy.can_place =
        !copy.is_moved && can_place(layout_.cuts[copy.leaf], copy.rank, kinds_.full.dtype().toScalarType());
    if (!copy.can_place) continue;
    const auto to = starts[copy.leaf] + static_cast<size_t>(copy.runs.start) * item;
    large.push_back({begin_of(copy), copy.rows.nbytes(), to});
    placed_ += copy.rows.numel();
  }
  if (large.empty()) return;
  const auto before = [](const auto& a, const auto& b) { return a.offset < b.offset; };
  std::sort(large.begin(), large.end(), before);
  size_t done = 0;
  const auto add_rest = [&](size_t end) {
    const auto part = static_cast<size_t>(layout_.part) * item;
    while (done < end) {
      const auto bytes = std::min(end, (done / part + 1) * part) - done;
      placements_.push_back({done, bytes, start});
      start += bytes;
      done += bytes;
    }
  };
  for (const auto& range : large) {
    add_rest(range.offset);
    placements_.push_back(range);
    done += range.bytes;
  }
  add_rest(static_cast<size_t>(layout_.world * layout_.part) * item);
  for (auto& copy : copies_) {
    const transport::DirectPlacement::Range begin{begin_of(copy), 0, 0};
    const auto& range = *std::prev(std::upper_bound(placements_.begin(), placements_.end(), begin, before));
    copy.rest = static_cast<int64_t>((range.to + begin.offset - range.offset) / item);
  }
}

int64_t FullCopies::with_rest(int64_t leaves, int64_t gathered, int64_t placed) {
  return std::max(leaves + gathered - placed, gathered);
}

void FullCopies::make_flat(FrontEndCallbacks& front) {
  at::Tensor whole;
  {
    const base::ComputeGuard guard;
    storages_.emplace_back(std::vector<int64_t>{layout_.world * layout_.part}, kinds_.full);
    whole = storages_.back().alias();
  }
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
  copies_ = before.copies_;
  copied_bytes_ = before.copied_bytes_;
  placements_ = before.placements_;
  placed_ = before.placed_;
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
  if (pending_) pending_->wait_noexcept();
  let_host_write();
  // No ComputeGuard: autograd has to see that the shard's version moves, as for any parameter that is loaded.
  const c10::AutoGradMode no_grad(false);
  auto shard = parameters()[index]->stored();
  shard.copy_(piece);
  mark_stale();
}

} // namespace shardwise::group
