#pragma once

#include "support/seconds.h"

#include <catch2/catch.hpp>

namespace shardwise::test {

/// Lets a program of Catch2 tell the seconds of its tests; included once a program, by the source that has main().
class SecondsListener : public Catch::TestEventListenerBase {
 public:
  using TestEventListenerBase::TestEventListenerBase;

  void testCaseStarting(const Catch::TestCaseInfo&) override {
    seconds_.begin();
  }
  void testCaseEnded(const Catch::TestCaseStats& stats) override {
    seconds_.end(stats.testInfo.name, stats.testInfo.lineInfo.file);
  }

 private:
  TestSeconds seconds_;
};

CATCH_REGISTER_LISTENER(SecondsListener)

} // namespace shardwise::test
