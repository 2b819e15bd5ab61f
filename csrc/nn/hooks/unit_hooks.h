#pragma once

#include "engine/front_end.h"

#include <shardwise/detail/export.h>

#include <memory>

namespace shardwise::nn {

class UnitTouch;

/// Adds hooks that tell a unit when its module begins and ends, and when its backward begins, for calls that fire
/// hooks. The touch trigger notices other calls. The outermost unit moves the inputs of its module to the mesh's
/// device. Inputs and outputs are cast as the unit's precision says. `touch` is null if the unit has no full copies.
void add_unit_hooks(
    torch::nn::Module& module, const std::shared_ptr<engine::Unit>& unit, const std::shared_ptr<UnitTouch>& touch);

/// The ways in which units learn what their modules do. Both are on, except in tests that show that each works alone.
/// Read when a module is wrapped; the same for all threads.
struct TestSwitches {
  bool touch = true;
  bool hooks = true;
};
SHARDWISE_API TestSwitches& test_switches();

} // namespace shardwise::nn
