#include <shardwise/counters.h>

#include <algorithm>

namespace shardwise {

static_assert(sizeof(Counters) == detail::kCounters.size() * sizeof(int64_t), "each has its name");

Counters& Counters::operator+=(const Counters& other) {
  const auto most = std::max(backwards, other.backwards);
  for (const auto& counter : detail::kCounters) this->*counter.of += other.*counter.of;
  backwards = most;
  return *this;
}

} // namespace shardwise
