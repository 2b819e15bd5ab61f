#pragma once

#include "late_test.h"

#include "late_device/group.h"
#include "stream_group/group.h"
#include "stream_group/streams.h"
#include "support/ranks.h"

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <optional>

namespace shardwise::test {

/// A rank with a communicator, of one or the other kind of groups of threads: on a device of its own, or on one that
/// all share, where it has a stream.
template <typename Group>
struct Own {
  static constexpr bool kShared = std::is_same_v<Group, stream_group::Group>;

  explicit Own(
      Rank& rank, const std::string& name = "one", std::chrono::milliseconds timeout = std::chrono::seconds(60))
      : rank(rank.rank()),
        size(rank.world_size()),
        device(late_device(kShared ? 0 : rank.rank())),
        guard(device),
        group(c10::make_intrusive<Group>(
            c10::make_intrusive<c10d::PrefixStore>(name, rank.store()), rank.rank(), rank.world_size(), device,
            timeout)) {
    if constexpr (kShared) on.emplace(borrowed.emplace(device).get());
  }
  at::Tensor full(double value, int64_t count = 6) const {
    return at::full({count}, value, at::TensorOptions(device).dtype(at::kFloat));
  }
  void synchronize() const {
    late::Device::of(device).synchronize_all();
  }

  int rank;
  int size;
  at::Device device;
  c10::DeviceGuard guard;
  std::optional<stream_group::BorrowedStream> borrowed;
  std::optional<c10::StreamGuard> on;
  c10::intrusive_ptr<Group> group;
};

} // namespace shardwise::test
