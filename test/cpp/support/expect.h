#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <vector>

namespace shardwise::test {

/// Fails the test unless each part is in the text.
inline void expect_text(const std::string& text, const std::vector<std::string>& parts) {
  for (const auto& part : parts) {
    EXPECT_NE(text.find(part), std::string::npos) << "The text lacks '" << part << "':\n" << text;
  }
}

/// The text of the error that fn raises.
inline std::string text_of(const std::function<void()>& fn) {
  try {
    fn();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "no error";
}

/// Fails the test unless fn raises an Expected whose text has all the parts, and no stack trace of torch's.
template <typename Expected>
void expect_error(const std::function<void()>& fn, const std::vector<std::string>& parts) {
  try {
    fn();
  } catch (const Expected& error) {
    const std::string text = error.what();
    expect_text(text, parts);
    EXPECT_EQ(text.find("frame #"), std::string::npos) << "a stack trace in the error: " << text;
    return;
  } catch (const std::exception& error) {
    ADD_FAILURE() << "an error of another type: " << error.what();
    return;
  }
  ADD_FAILURE() << "no error; its text was to have: " << (parts.empty() ? "" : parts.front());
}

} // namespace shardwise::test
