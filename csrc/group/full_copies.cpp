#include "group/full_copies.h"

#include "base/compute_guard.h"
#include "group/pieces.h"
#include "observe/fault_point.h"
#include "observe/label.h"
#include "transport/transport.h"

#include <shardwise/error.h>

#include <c10/util/StringUtil.h>

#include <algorithm>

namespace shardwise::group {
namespace {

/// How many sets of moves are remembered. A unit comes upon the same few pairs of buffers: those of its own turn, and
/// those that it gets when others were gathered ahead.
constexpr size_t kMostPlaces = 4;

} // namespace

FullCopies::FullCopies(std::vector<Parameter*> parameters, Setting setting, FrontEndCallbacks& front)
    : Copies(std::move(parameters)),
      layout_(std::move(setting.layout)),
      is_flat_(setting.is_flat),
      rank_(setting.rank),
      kinds_(setting.kinds) {
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
  await_gather();
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

void FullCopies::begin_unshard(
    const comm::Collectives& collectives, bool may_hold, comm::Buffers& buffers, const std::string& unit,
    Counters& counters) {
  if (!must_gather()) return;
  const observe::Label label("FSDP::all_gather", unit);
  ++counters.unshards;
  const bool from_held = holds() && collectives.size() * held_.numel() == layout_.world * layout_.part;
  begin_current();
  if (!from_held) drop_held(buffers);
  {
    const base::ComputeGuard compute;
    if (!from_held) counters.unsharded_bytes += collect();
    refill(collectives, buffers, counters);
    if (is_flat_) {
      gathered_ = layout_.world > 1 || lies_on_full_device() ? memory_ : send(buffers, counters);
    } else if (layout_.world > 1) {
      gathered_ = buffers.take(layout_.world * layout_.part, kinds_.full, counters, collectives.memory());
    } else {
      gathered_ = lies_on_full_device() ? part_ : send(buffers, counters);
    }
  }
  set_state(State::gathering);
  try {
    start_gather(collectives, from_held, may_hold, buffers, unit, counters);
  } catch (...) {
    drop_gather(buffers, counters);
    throw;
  }
}

void FullCopies::start_gather(
    const comm::Collectives& collectives, bool from_held, bool may_hold, comm::Buffers& buffers,
    const std::string& unit, Counters& counters) {
  observe::pass(observe::FaultPoint::unshard);
  if (layout_.world == 1) return;
  const base::ComputeGuard compute;
  auto part = from_held ? held_ : part_;
  if (collectives.memory() != nullptr) {
    part = put_in_place(part, collectives, counters);
  } else if (!from_held && !is_sent_as_it_is()) {
    part = send(buffers, counters);
  }
  std::optional<comm::SideStream::Scope> scope;
  if (!from_held && !lies_on_full_device()) scope.emplace(from_host_, gathered_.device());
  places_directly_ = !may_hold && !placements_.empty() && collectives.can_place();
  const transport::DirectPlacement placement{memory_, placements_};
  pending_ = collectives.all_gather(gathered_, part, named(unit), counters, places_directly_ ? &placement : nullptr);
  if (scope) begun_.note(gathered_);
}

// The part as it is sent: cast, and on the device of the full copies. In the layout `flat` a rank that is alone has it
// where it belongs already.
at::Tensor FullCopies::send(comm::Buffers& buffers, Counters& counters) {
  const bool is_whole = is_flat_ && layout_.world == 1;
  const auto sent = is_whole ? memory_ : buffers.take(layout_.part, kinds_.full, counters);
  put(part_, sent, counters);
  if (!is_whole) sent_ = sent;
  return sent;
}

// What this rank sends, in its place in what is gathered: so both ends of the gather lie in the process group's memory.
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

// What is issued from now on comes after the gather, as far as it is on a stream of ours.
void FullCopies::await_gather() {
  if (!lies_on_full_device() && gathered_.defined()) begun_.await(gathered_);
}

// All leaves lie in one piece of memory, so that the pool keeps few of them.
void FullCopies::refill(const comm::Collectives& collectives, comm::Buffers& buffers, Counters& counters) {
  if (memory_.defined()) {
    // Kept, or out of date.
  } else if (is_flat_) {
    memory_ = buffers.take(layout_.world * layout_.part, kinds_.full, counters, collectives.memory());
  } else {
    size_t bytes = 0;
    for (const auto& storage : storages_) bytes += layout::aligned(storage.bytes());
    memory_ = buffers.take(static_cast<int64_t>(bytes), kinds_.full.dtype(at::kByte), counters);
  }
  are_shared_ = transport::is_shared(memory_);
  size_t offset = 0;
  for (auto& storage : storages_) {
    storage.refill(memory_, offset);
    offset += layout::aligned(storage.bytes());
  }
}

void FullCopies::refuse_in_child() {
  for (size_t i = 0; i < seen_.size() && part_is_shared_; ++i) {
    if (!elsewhere_[i].defined()) transport::refuse_in_child(*seen_[i].unsafeGetStorageImpl());
  }
  if (!are_shared_) return;
  for (auto& storage : storages_) {
    if (!storage.freed()) storage.refuse_in_child();
  }
}

void FullCopies::copy_out() {
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
    const auto start = copy.rank * layout_.part + copy.offset;
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

// A gather that failed may still be using its buffers: they do not go back to the pool.
void FullCopies::leave_buffers() {
  await_gather();
  gathered_ = sent_ = at::Tensor();
  if (is_flat_ || places_directly_) memory_ = at::Tensor();
}

// Nobody may be served what a gather that failed left.
void FullCopies::drop_gather(comm::Buffers& buffers, Counters& counters) {
  leave_buffers();
  set_state(State::full);
  mark_stale();
  reshard(buffers, /*keeps_memory=*/false, counters);
}

// Gives the gather's buffers back, but not what was gathered in the layout `flat`, which is the full copies, or with
// one rank, which is the part.
void FullCopies::release(comm::Buffers& buffers) {
  const auto gathered = std::exchange(gathered_, at::Tensor());
  if (!is_flat_ && layout_.world > 1) buffers.give(gathered);
  buffers.give(std::exchange(sent_, at::Tensor()));
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

bool FullCopies::finish_unshard(int64_t holders, comm::Buffers& buffers, const std::string& unit, Counters& counters) {
  if (state() != State::gathering) return false;
  const observe::Label label("FSDP::all_gather_copy_out", unit);
  observe::pass(observe::FaultPoint::copy_out);
  {
    const base::ComputeGuard compute;
    auto pending = std::exchange(pending_, std::nullopt);
    try {
      if (pending) pending->wait();
    } catch (...) {
      drop_gather(buffers, counters);
      throw;
    }
    await_gather();
    copy_out();
    counters.unsharded_bytes += copied_bytes_ - (places_directly_ ? placed_bytes_ : 0);
    if (!written()) hold(holders, buffers, counters);
    release(buffers);
  }
  set_state(State::full);
  return written();
}

void FullCopies::reshard(comm::Buffers& buffers, bool keeps_memory, Counters& counters) {
  if (state() == State::freed) return;
  const base::ComputeGuard guard;
  auto pending = std::exchange(pending_, std::nullopt);
  if (pending && !pending->settle()) leave_buffers();
  await_gather();
  release(buffers);
  for (auto& storage : storages_) storage.free();
  if (!keeps_memory) buffers.give(std::exchange(memory_, at::Tensor()));
  set_state(State::freed);
  ++counters.reshards;
}

FullCopies::Sizes FullCopies::sizes() const {
  const auto own = static_cast<int64_t>(part_.itemsize());
  const auto compute = static_cast<int64_t>(kinds_.full.dtype().itemsize());
  int64_t elements = 0;
  for (const auto numel : numels_) elements += numel;
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

} // namespace shardwise::group
