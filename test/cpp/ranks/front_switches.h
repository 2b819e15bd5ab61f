#pragma once

#include "nn/hooks/unit_hooks.h"

#include <c10/util/ScopeExit.h>

namespace shardwise::test {

/// By what units learn what their modules do, for all ranks of the process, as long as the result lives.
[[nodiscard]] inline auto front_switches(bool touch, bool hooks) {
  nn::test_switches() = {.touch = touch, .hooks = hooks};
  return c10::make_scope_exit([] { nn::test_switches() = {}; });
}

} // namespace shardwise::test
