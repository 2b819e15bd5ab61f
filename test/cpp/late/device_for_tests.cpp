#include <cstdlib>

namespace shardwise::test {
namespace {

/// All tests of this program are on it; main() asks.
const bool is_late = setenv("SHARDWISE_TEST_DEVICE", "late", /*overwrite=*/1) == 0;

} // namespace
} // namespace shardwise::test
