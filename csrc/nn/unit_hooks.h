#pragma once

#include "engine/front_end.h"

#include <shardwise/export.h>

#include <memory>

namespace torch::nn {
class Module;
}

namespace shardwise::nn {

class UnitTouch;

/// Tells a unit, by hooks, where its module begins and ends and where its backward begins, wherever a call of the
/// module can be seen; other calls are the touch trigger's. The outermost unit moves the inputs of its module to the
/// device of the mesh. Casts inputs and outputs as the unit's precision says. `touch` is null where the unit has no
/// full copies.
void add_unit_hooks(
    torch::nn::Module& module, const std::shared_ptr<engine::Unit>& unit, const std::shared_ptr<UnitTouch>& touch);

/// By which ways units learn what their modules do. Both, but for tests that show each to do alone; read when a module
/// is wrapped, the same for all threads.
struct TestSwitches {
  bool touch = true;
  bool hooks = true;
};
SHARDWISE_API TestSwitches& test_switches();

} // namespace shardwise::nn
