#include "comm/landing.h"

#include <utility>

namespace shardwise::comm {
namespace {

thread_local const Landing* handed_over = nullptr;

} // namespace

LandingScope::LandingScope(const Landing* landing) : outer_(std::exchange(handed_over, landing)) {}

LandingScope::~LandingScope() {
  handed_over = outer_;
}

const Landing* LandingScope::current() {
  return handed_over;
}

} // namespace shardwise::comm
