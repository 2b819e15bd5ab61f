#include "comm/streams/host_copies.h"

#include "base/caller_lock.h"

#include <utility>

namespace shardwise::comm {

void HostCopies::begin(const at::Tensor& from, LastUse& use, bool waits, c10::function_ref<void()> copy) {
  const SideStream::Scope scope(stream_, from.device());
  use.await(from);
  copy();
  use.note(from);
  under_way_ = under_way_ || !waits;
}

void HostCopies::wait() {
  if (!std::exchange(under_way_, false)) return;
  const base::WithoutCallerLock unlocked;
  stream_.make_host_wait();
}

} // namespace shardwise::comm
