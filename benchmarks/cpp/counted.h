#pragma once

#include <shardwise/counters.h>

#include <iostream>
#include <string>

/// A line of JSON behind some words: what was counted between `before` and `after`.
inline void print_counters(
    const std::string& words, const shardwise::Counters& before, const shardwise::Counters& after) {
  std::cout << words << " {";
  const char* comma = "";
  for (const auto& [name, of] : shardwise::detail::kCounters) {
    std::cout << comma << '"' << name << "\": " << after.*of - before.*of;
    comma = ", ";
  }
  std::cout << "}" << std::endl;
}
