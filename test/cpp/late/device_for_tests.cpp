#include "kernels/cuda_library.h"
#include "late_device/faults.h"

#include <cstdlib>

namespace shardwise::test {
namespace {

/// All tests of this program are on it, but for one that starts itself anew with another; main() asks.
const bool is_late = setenv("SHARDWISE_TEST_DEVICE", "late", /*overwrite=*/0) == 0;

[[maybe_unused]] const bool tells_captures = [] {
  kernels::ask_for_captures([](const c10::Stream& stream) { return late::Capturing::on(stream.device_index()); });
  return true;
}();

} // namespace
} // namespace shardwise::test
