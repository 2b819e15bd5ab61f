#include "engine/step_walk.h"

namespace shardwise::engine {
namespace {

bool brings_gradient(const StepEvent& event) {
  return event.kind == StepEvent::Kind::use && event.gradient > 0;
}

} // namespace

StepWalk::StepWalk(const std::vector<UnitBytes>& units, const std::vector<StepEvent>& events, size_t sums_in_flight)
    : units_(units),
      events_(events) {
  for (const auto& unit : units) {
    const UnitTiming timing{
        .reshard_after_forward = unit.reshards_after_forward,
        .is_gathered = unit.is_gathered,
        .always_sums = true,
        .sums_in_stream = unit.sums_in_stream,
        .sums_in_flight = sums_in_flight};
    order_.add(static_cast<int64_t>(order_.made().size()), timing, unit.outer);
  }
}

void StepWalk::forward() {
  for (const auto& event : events_) {
    if (event.kind == StepEvent::Kind::end) {
      order_.leave(event.unit, /*exactly=*/false, *this);
    } else {
      order_.enter(event.unit, Keep::outer, {}, *this);
    }
    if (event.kind == StepEvent::Kind::use) use(event);
  }
}

// The index of an event stands for its parameter.
void StepWalk::backward() {
  in_backward_ = true;
  order_.begin_backward(kBackward.backward, *this);
  for (size_t i = 0; i < events_.size(); ++i) {
    if (brings_gradient(events_[i])) order_.expect(events_[i].unit, i);
  }
  for (size_t i = events_.size(); i-- > 0;) {
    const auto& event = events_[i];
    if (event.kind == StepEvent::Kind::begin) continue;
    const auto keep = event.kind == StepEvent::Kind::end ? Keep::outer_and_inner : Keep::outer;
    order_.enter(event.unit, keep, kBackward, *this);
    if (event.kind == StepEvent::Kind::use) use(event);
    if (brings_gradient(event)) order_.gradient_arrived(event.unit, i, kBackward, *this);
  }
  order_.end_backward(/*publishes=*/true, *this);
  in_backward_ = false;
}

} // namespace shardwise::engine
