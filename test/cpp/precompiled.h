// The headers that the tests with ranks include; found by the compiler, never included by hand.
#include <gtest/gtest.h>
#include <shardwise/shardwise.h>
#include <torch/torch.h>

#include "support/expect.h"
#include "support/processes.h"
#include "support/ranks.h"
