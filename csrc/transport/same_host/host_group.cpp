#include "transport/same_host/host_group.h"

#include <ATen/ops/empty.h>
#include "base/on_host.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <random>

namespace shardwise::transport::same_host {
namespace {

/// What a rank tells the others about itself. The addresses are zeros if it shares no memory.
struct RankInfo {
  std::array<char, 128> host{};
  uint64_t word = 0;
  Segment::Address arena;
  Segment::Address board;
};

template <typename T>
std::vector<T> from_all(c10d::Backend& gloo, const T& mine, std::chrono::milliseconds timeout) {
  const auto size = static_cast<int64_t>(sizeof(T));
  auto own = at::empty({size}, base::on_host(at::kByte));
  auto all = at::empty({size * gloo.getSize()}, base::on_host(at::kByte));
  std::memcpy(own.mutable_data_ptr(), &mine, sizeof(T));
  c10d::AllgatherOptions options;
  options.timeout = timeout;
  gloo._allgather_base(all, own, options)->wait();
  std::vector<T> result(static_cast<size_t>(gloo.getSize()));
  std::memcpy(result.data(), all.const_data_ptr(), result.size() * sizeof(T));
  return result;
}

} // namespace

HostGroup::Discovery HostGroup::discover(
    c10d::Backend& gloo, bool wanted, const std::string& host, std::chrono::milliseconds timeout) {
  std::random_device random;
  const auto word = (uint64_t{random()} << 32U) | random();
  if (gloo.getSize() == 1) return {.members = nullptr, .hosts = {host}, .word = word};
  auto arena = wanted ? Arena::of_this_process() : nullptr;
  auto board = arena ? Segment::make(ControlBlock(gloo.getSize()).bytes()) : std::nullopt;
  RankInfo own;
  own.word = word;
  std::copy_n(host.begin(), std::min(host.size(), own.host.size()), own.host.begin());
  if (board) {
    own.arena = arena->address();
    own.board = board->address();
  }
  const auto infos = from_all(gloo, own, timeout);
  Discovery found{.members = nullptr, .hosts = {}, .word = infos.front().word};
  for (const auto& other : infos)
    found.hosts.emplace_back(other.host.data(), strnlen(other.host.data(), other.host.size()));
  const auto is_here = [&](const RankInfo& other) { return other.board.bytes > 0 && other.host == infos.front().host; };
  if (!std::all_of(infos.begin(), infos.end(), is_here)) return found;
  std::vector<Peer> peers;
  for (const auto& other : infos) {
    auto process = PeerProcess::of(other.arena);
    auto view = SegmentView::open(other.board);
    if (process && view) peers.push_back({std::move(process), *std::move(view)});
  }
  const auto can = from_all(gloo, static_cast<uint8_t>(peers.size() == infos.size()), timeout);
  board->close();
  if (std::all_of(can.begin(), can.end(), [](uint8_t one) { return one == 1; })) {
    found.members = std::make_shared<HostGroup>(HostGroup{std::move(arena), *std::move(board), std::move(peers)});
  }
  return found;
}

} // namespace shardwise::transport::same_host
