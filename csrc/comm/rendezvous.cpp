#include "comm/rendezvous.h"

#include "comm/reason.h"

#include <shardwise/error.h>

#include <c10/util/StringUtil.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

namespace shardwise::comm {

c10::intrusive_ptr<c10d::Store> part_for_next_mesh(const c10::intrusive_ptr<c10d::Store>& store, int rank) {
  const auto number = store->add(c10::str("meshes of rank ", rank), 1);
  return c10::make_intrusive<c10d::PrefixStore>(c10::str("mesh ", number), store);
}

void meet(c10d::Store& store, int rank, int world_size, std::chrono::milliseconds timeout) {
  if (world_size == 1) return;
  const auto sign = [&](const std::string& list, bool wait) {
    const auto all = list + " by all";
    if (store.add(list, 1) == world_size) store.set(all, std::vector<uint8_t>{1});
    if (wait) store.wait({all}, timeout);
  };
  try {
    sign("made", true);
    sign("left", rank == 0);
  } catch (const std::exception& error) {
    throw PeerError(c10::str(
        "shardwise: rank ", rank, " of ", world_size, " made its process groups, but not all ranks made theirs within ",
        timeout.count(),
        " ms. Look for the error of another rank, or give more time with MeshOptions().connect_timeout(). "
        "The reason given: ",
        reason(error)));
  }
}

} // namespace shardwise::comm
