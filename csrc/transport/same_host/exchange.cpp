#include "transport/same_host/exchange.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace shardwise::transport::same_host {

SameHostExchange::SameHostExchange(Progress& progress, std::shared_ptr<HostGroup> members)
    : Exchange(progress),
      members_(std::move(members)),
      layout_(world()),
      steps_(progress, members_->board, members_->peers) {}

const std::byte* SameHostExchange::board(int rank, size_t offset) const {
  return members_->peers[rank].board.at(offset);
}

std::optional<Exchange::Terms> SameHostExchange::open(const Call& call, const Given& given) {
  progress_.begin(call.signature, call.timeout);
  const auto number = progress_.number();
  const bool small = given.bytes <= kInline;
  auto* mine = members_->board.begin();
  std::memcpy(mine + layout_.signature(number), &call.signature, sizeof(Signature));
  for (size_t peer = 0; peer < given.places.size(); ++peer) {
    const auto* place = given.places[peer];
    if (small) std::copy_n(place, given.bytes, mine + layout_.inlined(number, static_cast<int>(peer)));
    const auto offset =
        !small && members_->arena->holds(place, given.bytes) ? uint64_t{members_->arena->offset(place)} : kNowhere;
    std::memcpy(mine + layout_.offset_for(number, static_cast<int>(peer)), &offset, sizeof offset);
  }
  steps_.take_and_wait();
  Terms terms;
  bool staged = false;
  for (int peer = 0; peer < world(); ++peer) {
    Signature theirs;
    std::memcpy(&theirs, board(peer, layout_.signature(number)), sizeof(Signature));
    compare(call.signature, peer, theirs);
    if (given.places.empty()) continue;
    if (small) {
      terms.push_back(board(peer, layout_.inlined(number, rank())));
      continue;
    }
    // Looks at the data for every reader, not just this rank: all ranks must agree on whether to stage.
    for (int reader = 0; reader < world(); ++reader) {
      uint64_t offset = kNowhere;
      std::memcpy(&offset, board(peer, layout_.offset_for(number, reader)), sizeof offset);
      staged = staged || offset == kNowhere;
      if (reader == rank() && !staged) terms.push_back(members_->peers[peer].process->arena.at(offset));
    }
  }
  if (staged) return std::nullopt;
  return terms;
}

void SameHostExchange::all_gather(const Call& call, const std::vector<Spans>& places, const std::byte* input) {
  const auto bytes = call.bytes();
  const auto terms = open(call, {.places = {places.size(), input}, .bytes = bytes});
  if (terms) {
    for (const int peer : peers()) fill_spans(places[peer], 0, (*terms)[peer], bytes);
  }
  fill_spans(places[rank()], 0, input, bytes);
  if (!terms) return gather_staged(places, input, bytes);
  if (bytes <= kInline) return;
  steps_.take_and_wait();
  steps_.require_all_running();
}

void SameHostExchange::reduce_scatter(
    const Call& call, std::byte* output, const std::vector<const std::byte*>& inputs) {
  const auto bytes = call.bytes();
  const Given given{.places = inputs, .bytes = bytes};
  const auto terms = open(call, given);
  if (!terms) return scatter_staged(call, output, given);
  sum(call, output, *terms, bytes);
  if (bytes <= kInline) return;
  steps_.take_and_wait();
  steps_.require_all_running();
}

// A rank sums its own share in place; peers read only the other parts of its data. After the next step, when all have
// read those, it overwrites them with the peers' sums.
void SameHostExchange::all_reduce(const Call& call, std::byte* data) {
  const auto bytes = call.bytes();
  auto terms = open(call, {.places = {static_cast<size_t>(world()), data}, .bytes = bytes});
  if (!terms) return reduce_staged(call, data);
  if (bytes <= kInline) return sum(call, data, *terms, bytes);
  const auto wholes = *terms;
  const auto mine = SumRange::of(bytes, rank(), world());
  for (auto& term : *terms) term += mine.begin;
  sum(call, data + mine.begin, *terms, mine.bytes);
  steps_.take_and_wait();
  for (const int peer : peers()) {
    const auto theirs = SumRange::of(bytes, peer, world());
    std::copy_n(wholes[peer] + theirs.begin, theirs.bytes, data + theirs.begin);
  }
  steps_.take_and_wait();
  steps_.require_all_running();
}

// Two stages alternate: a rank that writes to one has seen all ranks take a step since they last read it.
void SameHostExchange::gather_staged(const std::vector<Spans>& places, const std::byte* input, size_t bytes) {
  for (size_t begin = 0; begin < bytes; begin += ControlBlock::kStage) {
    const auto size = std::min(ControlBlock::kStage, bytes - begin);
    const auto stage = layout_.stage(staged_++);
    std::copy_n(input + begin, size, members_->board.begin() + stage);
    steps_.take_and_wait();
    for (const int peer : peers()) fill_spans(places[peer], begin, board(peer, stage), size);
  }
}

void SameHostExchange::scatter_staged(const Call& call, std::byte* output, const Given& given) {
  const auto piece = layout_.piece();
  for (size_t begin = 0; begin < given.bytes; begin += piece) {
    const auto size = std::min(piece, given.bytes - begin);
    const auto stage = layout_.stage(staged_++);
    for (const int peer : peers()) {
      std::copy_n(given.places[peer] + begin, size, members_->board.begin() + stage + peer * piece);
    }
    steps_.take_and_wait();
    Terms terms;
    for (int peer = 0; peer < world(); ++peer) {
      terms.push_back(peer == rank() ? given.places[peer] + begin : board(peer, stage + rank() * piece));
    }
    sum(call, output + begin, terms, size);
  }
}

// The sum of a piece goes to the slot on the stage that this rank's own input would take.
void SameHostExchange::reduce_staged(const Call& call, std::byte* data) {
  const auto piece = layout_.piece();
  const auto bytes = call.bytes();
  const auto piece_of = [&](int peer, size_t begin) {
    const auto share = SumRange::of(bytes, peer, world());
    return SumRange{
        .begin = share.begin + begin, .bytes = begin < share.bytes ? std::min(piece, share.bytes - begin) : 0};
  };
  const auto largest = SumRange::of(bytes, 0, world()).bytes;
  for (size_t begin = 0; begin < largest; begin += piece) {
    const auto stage = layout_.stage(staged_++);
    for (const int peer : peers()) {
      const auto theirs = piece_of(peer, begin);
      std::copy_n(data + theirs.begin, theirs.bytes, members_->board.begin() + stage + peer * piece);
    }
    steps_.take_and_wait();
    const auto mine = piece_of(rank(), begin);
    Terms terms;
    for (int peer = 0; peer < world(); ++peer) {
      terms.push_back(peer == rank() ? data + mine.begin : board(peer, stage + rank() * piece));
    }
    sum(call, data + mine.begin, terms, mine.bytes);
    std::copy_n(data + mine.begin, mine.bytes, members_->board.begin() + stage + rank() * piece);
    steps_.take_and_wait();
    for (const int peer : peers()) {
      const auto theirs = piece_of(peer, begin);
      std::copy_n(board(peer, stage + peer * piece), theirs.bytes, data + theirs.begin);
    }
  }
}

} // namespace shardwise::transport::same_host
