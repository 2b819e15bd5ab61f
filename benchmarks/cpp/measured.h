#pragma once

#include "blocks.h"
#include "meters.h"

#include <c10/util/StringUtil.h>

#include <algorithm>
#include <ctime>
#include <iostream>
#include <string>

inline double cpu_seconds() {
  timespec time{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

/// Under callgrind it leaves files of counts, of a few and of many steps, each some times over; alone it prints the
/// microseconds of the fastest step.
template <typename Step>
void measure(const std::string& name, const Size& size, const Step& step) {
  constexpr int kWarm = 3;
  constexpr int kFew = 1;
  constexpr int kMany = 3;
  constexpr int kTimes = 4;
  constexpr int kTimed = 40;
  if (!wanted(name)) return;
  for (int i = 0; i < kWarm; ++i) step();
  if (meters_count_instructions() != 0) {
    meters_start();
    step();
    for (int time = 0; time < kTimes; ++time) {
      for (const auto steps : {kFew, kMany}) {
        meters_zero();
        for (int i = 0; i < steps; ++i) step();
        meters_dump(c10::str(name, " ", size.text(), " ", steps).c_str());
      }
    }
    meters_stop();
    return;
  }
  double best = 1e9;
  for (int i = 0; i < kTimed; ++i) {
    const auto begin = cpu_seconds();
    step();
    best = std::min(best, cpu_seconds() - begin);
  }
  std::cout << name << " " << size.text() << " " << best * 1e6 << std::endl;
}
