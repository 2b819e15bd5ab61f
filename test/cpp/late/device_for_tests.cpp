#include <cstdlib>

namespace shardwise::test {
namespace {

/// All tests of this program are on it, but for one that starts itself anew with another; main() asks.
const bool is_late = setenv("SHARDWISE_TEST_DEVICE", "late", /*overwrite=*/0) == 0;

} // namespace
} // namespace shardwise::test
