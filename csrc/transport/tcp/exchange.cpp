#include "transport/tcp/exchange.h"

#include "transport/tuning.h"

#include <algorithm>
#include <array>

namespace shardwise::transport::tcp {

TcpExchange::TcpExchange(Carrier& carrier, const std::vector<std::string>& hosts)
    : Exchange(carrier.progress()),
      connections_(carrier),
      announcements_(connections_),
      ring_(connections_, hosts) {}

bool TcpExchange::leaves_all_reduce_to_gloo(size_t bytes, at::ScalarType dtype, c10d::ReduceOp::RedOpType op) const {
  return gloo_is_as_fast(bytes, world(), dtype, op);
}

void TcpExchange::begin(const Call& call, size_t bytes, Announcements::Inlined inlined) {
  progress_.begin(call.signature, call.timeout);
  announcements_.exchange(call.signature, bytes, inlined);
  for (const int peer : peers()) compare(call.signature, peer, announcements_.signature(peer));
}

Exchange::Terms TcpExchange::announced(const std::byte* own) const {
  Terms terms;
  for (int peer = 0; peer < world(); ++peer) terms.push_back(peer == rank() ? own : announcements_.data(peer));
  return terms;
}

void TcpExchange::announce(const Call& call) {
  begin(call, 0, [](int) -> const std::byte* { return nullptr; });
}

void TcpExchange::all_gather(const Call& call, const std::vector<Spans>& places, const std::byte* input) {
  const auto bytes = call.bytes();
  const bool small = bytes <= kInline;
  begin(call, small ? bytes : 0, [&](int) { return input; });
  std::vector<Message> messages;
  for (const int peer : peers()) {
    if (small) {
      fill_spans(places[peer], 0, announcements_.data(peer), bytes);
    } else {
      for (const auto& span : places[peer]) {
        messages.push_back(connections_.receive(peer, span.data(), span.size(), Phase::gather));
      }
    }
  }
  if (!small) {
    for (const int peer : peers()) {
      const auto* from = input;
      for (const auto& span : places[rank()]) {
        messages.push_back(connections_.send(peer, from, span.size(), Phase::gather));
        from += span.size();
      }
    }
  }
  fill_spans(places[rank()], 0, input, bytes);
  connections_.wait(messages);
}

template <typename Summed>
void TcpExchange::sum_pieces(
    const Call& call, std::byte* output, const Parts& parts, size_t piece, const Summed& summed) {
  const auto peers = this->peers();
  const auto world = static_cast<size_t>(this->world());
  const auto mine = parts.bytes[rank()];
  const auto count = (mine + piece - 1) / piece;
  const auto size_of = [&](size_t begin, size_t end) { return begin < end ? std::min(piece, end - begin) : 0; };
  const auto place = [&](size_t number, size_t peer) {
    return pieces_.data() + (number % kPieces * world + peer) * piece;
  };
  pieces_.resize(std::max(pieces_.size(), kPieces * world * piece));

  std::array<std::vector<Message>, kPieces> coming;
  const auto expect = [&](size_t number) {
    auto& messages = coming[number % kPieces];
    messages.clear();
    if (number >= count) return;
    for (const int peer : peers) {
      messages.push_back(connections_.receive(peer, place(number, peer), size_of(number * piece, mine), Phase::sum));
    }
  };
  for (size_t number = 0; number < kPieces; ++number) expect(number);
  std::vector<Message> sent;
  const auto largest = *std::max_element(parts.bytes.begin(), parts.bytes.end());
  for (size_t begin = 0; begin < largest; begin += piece) {
    for (const int peer : peers) {
      const auto bytes = size_of(begin, parts.bytes[peer]);
      if (bytes > 0) sent.push_back(connections_.send(peer, parts.inputs[peer] + begin, bytes, Phase::sum));
    }
  }
  Terms terms(world);
  for (size_t number = 0; number < count; ++number) {
    connections_.wait(coming[number % kPieces]);
    for (size_t peer = 0; peer < world; ++peer) terms[peer] = place(number, peer);
    const auto begin = number * piece;
    const auto bytes = size_of(begin, mine);
    terms[rank()] = parts.inputs[rank()] + begin;
    sum(call, output + begin, terms, bytes);
    expect(number + kPieces);
    summed(begin, bytes);
  }
  connections_.wait(sent);
}

void TcpExchange::reduce_scatter(const Call& call, std::byte* output, const std::vector<const std::byte*>& inputs) {
  const auto bytes = call.bytes();
  const bool small = bytes <= kInline;
  begin(call, small ? bytes : 0, [&](int peer) { return inputs[peer]; });
  if (small) return sum(call, output, announced(inputs[rank()]), bytes);
  const Parts parts{.inputs = inputs, .bytes = std::vector<size_t>(inputs.size(), bytes)};
  sum_pieces(call, output, parts, piece_bytes(bytes), [](size_t, size_t) {});
}

void TcpExchange::sum_whole(const Call& call, std::byte* data) {
  const auto bytes = call.bytes();
  pieces_.resize(std::max(pieces_.size(), static_cast<size_t>(world()) * bytes));
  Terms terms(static_cast<size_t>(world()), data);
  std::vector<Message> messages;
  for (const int peer : peers()) {
    auto* place = pieces_.data() + static_cast<size_t>(peer) * bytes;
    terms[peer] = place;
    messages.push_back(connections_.receive(peer, place, bytes, Phase::sum));
  }
  for (const int peer : peers()) messages.push_back(connections_.send(peer, data, bytes, Phase::sum));
  connections_.wait(messages);
  sum(call, data, terms, bytes);
}

// Each rank sums one part, and sends it to all others piece by piece. A finished piece of another rank's part
// overwrites this rank's input for that piece. This is safe: that rank could finish it only after it had received that
// input.
void TcpExchange::all_reduce(const Call& call, std::byte* data) {
  const auto bytes = call.bytes();
  const bool small = bytes <= kInline;
  begin(call, small ? bytes : 0, [&](int) { return data; });
  if (small) return sum(call, data, announced(data), bytes);
  if (all_reduces_in_one_round(bytes, world())) return sum_whole(call, data);
  if (uses_ring(bytes, world(), ring_.hosts(), call.signature.dtype)) return ring_.all_reduce(call, data);

  const auto largest = SumRange::of(bytes, 0, world()).bytes;
  const auto piece = piece_bytes(largest);
  Parts parts;
  std::vector<std::byte*> places;
  for (int peer = 0; peer < world(); ++peer) {
    const auto share = SumRange::of(bytes, peer, world());
    places.push_back(data + share.begin);
    parts.inputs.push_back(data + share.begin);
    parts.bytes.push_back(share.bytes);
  }
  std::vector<Message> messages;
  for (size_t begin = 0; begin < largest; begin += piece) {
    for (const int peer : peers()) {
      if (begin >= parts.bytes[peer]) continue;
      const auto size = std::min(piece, parts.bytes[peer] - begin);
      messages.push_back(connections_.receive(peer, places[peer] + begin, size, Phase::gather));
    }
  }
  sum_pieces(call, places[rank()], parts, piece, [&](size_t begin, size_t size) {
    for (const int peer : peers()) {
      messages.push_back(connections_.send(peer, places[rank()] + begin, size, Phase::gather));
    }
  });
  connections_.wait(messages);
}

} // namespace shardwise::transport::tcp
