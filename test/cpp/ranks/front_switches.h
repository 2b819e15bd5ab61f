#pragma once

#include "nn/hooks/unit_hooks.h"

namespace shardwise::test {

/// By what units learn what their modules do, for all ranks of the process; put back at the end of the test.
class FrontSwitches {
 public:
  FrontSwitches(bool touch, bool hooks) {
    nn::test_switches() = {.touch = touch, .hooks = hooks};
  }
  ~FrontSwitches() {
    nn::test_switches() = {};
  }
  FrontSwitches(const FrontSwitches&) = delete;
  FrontSwitches& operator=(const FrontSwitches&) = delete;
};

} // namespace shardwise::test
