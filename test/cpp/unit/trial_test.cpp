// Whether the kernels run on a device is tried once for each.
#include "kernels/trial.h"

#include <c10/util/Exception.h>
#include <catch2/catch.hpp>

#include <string>
#include <vector>

namespace shardwise::kernels {
namespace {

struct Warnings : c10::WarningHandler {
  void process(const c10::Warning& warning) override {
    texts.push_back(warning.msg());
  }
  std::vector<std::string> texts;
};

at::Device device(int index) {
  return {at::kCUDA, static_cast<c10::DeviceIndex>(index)};
}

} // namespace

TEST_CASE("each device is tried once, and one on which kernels do not run is warned of once", "[kernels]") {
  std::vector<int> tried;
  Trial trial([&](at::Device one) -> std::string {
    tried.push_back(one.index());
    return one.index() == 1 ? "no kernel image is available" : "";
  });
  Warnings warnings;
  const c10::WarningUtils::WarningHandlerGuard guard(&warnings);
  for (int turn = 0; turn < 3; ++turn) {
    CHECK(trial.succeeds_on(device(0)));
    CHECK_FALSE(trial.succeeds_on(device(1)));
    CHECK(trial.succeeds_on(device(2)));
  }
  CHECK(tried == std::vector<int>{0, 1, 2});
  REQUIRE(warnings.texts.size() == 1);
  for (const auto* part : {"cuda:1", "no kernel image is available", "one by one", "CMAKE_CUDA_ARCHITECTURES"}) {
    CHECK(warnings.texts[0].find(part) != std::string::npos);
  }
}

} // namespace shardwise::kernels
