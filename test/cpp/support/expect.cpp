#include "support/expect.h"

#include "support/processes.h"

#include <gtest/gtest.h>

#include <cstdlib>

namespace shardwise::test {
namespace {

constexpr const char* kInner = "SHARDWISE_TEST_INNER";

} // namespace

void expect_text(const std::string& text, const std::vector<std::string>& parts) {
  for (const auto& part : parts) {
    EXPECT_NE(text.find(part), std::string::npos) << "The text lacks '" << part << "':\n" << text;
  }
}

void fail_expectation(const std::string& text) {
  ADD_FAILURE() << text;
}

Ended run_inner(const Environment& environment) {
  auto changes = environment;
  changes.emplace_back(kInner, "1");
  return run_commands({this_test(changes)}, std::chrono::seconds(90)).front();
}

bool inner() {
  return std::getenv(kInner) != nullptr;
}

} // namespace shardwise::test
