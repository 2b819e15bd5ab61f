#pragma once

#include <functional>
#include <string>
#include <vector>

namespace shardwise::test {

/// Fails the test unless each part is in the text.
void expect_text(const std::string& text, const std::vector<std::string>& parts);

/// The text of the error that fn raises.
inline std::string text_of(const std::function<void()>& fn) {
  try {
    fn();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "no error";
}

void fail_expectation(const std::string& text);

/// Fails the test unless fn raises an Expected whose text has all the parts, and no stack trace of torch's.
template <typename Expected>
void expect_error(const std::function<void()>& fn, const std::vector<std::string>& parts) {
  try {
    fn();
  } catch (const Expected& error) {
    const std::string text = error.what();
    expect_text(text, parts);
    if (text.find("frame #") != std::string::npos) fail_expectation("a stack trace in the error: " + text);
    return;
  } catch (const std::exception& error) {
    fail_expectation(std::string("an error of another type: ") + error.what());
    return;
  }
  fail_expectation("no error; its text was to have: " + (parts.empty() ? "" : parts.front()));
}

} // namespace shardwise::test
