#include "transport/direct_placement.h"

#include <utility>

namespace shardwise::transport {
namespace {

thread_local const DirectPlacement* handed_over = nullptr;

} // namespace

DirectPlacementScope::DirectPlacementScope(const DirectPlacement* placement)
    : outer_(std::exchange(handed_over, placement)) {}

DirectPlacementScope::~DirectPlacementScope() {
  handed_over = outer_;
}

const DirectPlacement* DirectPlacementScope::current() {
  return handed_over;
}

} // namespace shardwise::transport
