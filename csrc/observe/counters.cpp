#include <shardwise/counters.h>

#include <algorithm>

namespace shardwise {

Counters& Counters::operator+=(const Counters& other) {
  backwards = std::max(backwards, other.backwards);
  all_reduces += other.all_reduces;
  broadcasts += other.broadcasts;
  all_gathers += other.all_gathers;
  reduce_scatters += other.reduce_scatters;
  collective_bytes += other.collective_bytes;
  comparisons += other.comparisons;
  unshards += other.unshards;
  reshards += other.reshards;
  copied_bytes += other.copied_bytes;
  unsharded_bytes += other.unsharded_bytes;
  allocations += other.allocations;
  return *this;
}

} // namespace shardwise
