#include "transport/tcp/ring.h"

#include "transport/sums.h"
#include "transport/tuning.h"

#include <algorithm>
#include <set>

namespace shardwise::transport::tcp {
namespace {

/// A piece of a rank's share as it travels round the ring.
struct Piece {
  size_t begin;
  size_t bytes;
  /// Whether it is complete once this rank has handled it: it has been all the way round.
  bool is_last;
};

/// In the order in which a rank receives them: first the pieces of share `first_share`, then those of the share before
/// that, and so on.
std::vector<Piece> pieces_from(const Call& call, int first_share, int world, size_t size) {
  std::vector<Piece> pieces;
  for (int round = 0; round + 1 < world; ++round) {
    const auto share = SumRange::of(call.bytes(), (first_share - round + world) % world, world);
    for (size_t begin = 0; begin < share.bytes; begin += size) {
      pieces.push_back({share.begin + begin, std::min(size, share.bytes - begin), round + 2 == world});
    }
  }
  return pieces;
}

} // namespace

Ring::Ring(Connections& connections, const std::vector<std::string>& hosts)
    : connections_(connections),
      hosts_(static_cast<int>(std::set(hosts.begin(), hosts.end()).size())) {
  for (int rank = 0; rank < connections.size(); ++rank) ranks_.push_back(rank);
  std::stable_sort(ranks_.begin(), ranks_.end(), [&](int a, int b) { return hosts.at(a) < hosts.at(b); });
  position_ = static_cast<int>(std::find(ranks_.begin(), ranks_.end(), connections.rank()) - ranks_.begin());
}

int Ring::rank_at(int position) const {
  const auto world = connections_.size();
  return ranks_[(position + world) % world];
}

// Every rank receives and sends the same pieces in the same order, so messages with one tag arrive where they belong. A
// complete piece overwrites this rank's own input for it. This is safe: it can be complete only after that input was
// received.
void Ring::all_reduce(const Call& call, std::byte* data) {
  const auto world = connections_.size();
  const auto next = rank_at(position_ + 1);
  const auto before = rank_at(position_ - 1);
  const auto size = piece_bytes(SumRange::of(call.bytes(), 0, world).bytes);
  const auto item = c10::elementSize(call.signature.dtype);
  const auto coming = pieces_from(call, position_ - 1, world, size);
  const auto complete = pieces_from(call, position_, world, size);
  pieces_.resize(std::max(pieces_.size(), kPieces * size));

  std::vector<Message> sums;
  const auto expect = [&] {
    const auto number = sums.size();
    if (number == coming.size()) return;
    sums.push_back(
        connections_.receive(before, pieces_.data() + number % kPieces * size, coming[number].bytes, Phase::sum));
  };
  for (size_t i = 0; i < kPieces; ++i) expect();
  std::vector<Message> results;
  for (const auto& piece : complete) {
    results.push_back(connections_.receive(before, data + piece.begin, piece.bytes, Phase::gather));
  }
  std::vector<Message> sent;
  const auto own = SumRange::of(call.bytes(), position_, world);
  for (size_t begin = 0; begin < own.bytes; begin += size) {
    const auto bytes = std::min(size, own.bytes - begin);
    sent.push_back(connections_.send(next, data + own.begin + begin, bytes, Phase::sum));
  }
  for (size_t number = 0; number < coming.size(); ++number) {
    connections_.wait(sums[number]);
    const auto& piece = coming[number];
    auto* sum = data + piece.begin;
    const auto elements = static_cast<int64_t>(piece.bytes / item);
    add_up(sum, {pieces_.data() + number % kPieces * size, sum}, elements, call.signature.dtype, /*mean=*/false);
    if (piece.is_last && call.is_mean()) divide(sum, elements, call.signature.dtype, world);
    expect();
    sent.push_back(connections_.send(next, sum, piece.bytes, piece.is_last ? Phase::gather : Phase::sum));
  }
  for (size_t number = 0; number < complete.size(); ++number) {
    connections_.wait(results[number]);
    const auto& piece = complete[number];
    if (!piece.is_last) sent.push_back(connections_.send(next, data + piece.begin, piece.bytes, Phase::gather));
  }
  connections_.wait(sent);
}

} // namespace shardwise::transport::tcp
