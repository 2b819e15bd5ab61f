#include "support/expect.h"

#include <gtest/gtest.h>

namespace shardwise::test {

void expect_text(const std::string& text, const std::vector<std::string>& parts) {
  for (const auto& part : parts) {
    EXPECT_NE(text.find(part), std::string::npos) << "The text lacks '" << part << "':\n" << text;
  }
}

void fail_expectation(const std::string& text) {
  ADD_FAILURE() << text;
}

} // namespace shardwise::test
