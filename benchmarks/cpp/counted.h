#pragma once

#include <shardwise/counters.h>

#include <iostream>
#include <string>

/// A line of JSON behind some words: what was counted between `before` and `after`.
inline void print_counters(
    const std::string& words, const shardwise::Counters& before, const shardwise::Counters& after) {
  using shardwise::Counters;
  const std::pair<const char*, int64_t Counters::*> names[] = {
      {"all_gathers", &Counters::all_gathers},   {"reduce_scatters", &Counters::reduce_scatters},
      {"all_reduces", &Counters::all_reduces},   {"broadcasts", &Counters::broadcasts},
      {"comparisons", &Counters::comparisons},   {"collective_bytes", &Counters::collective_bytes},
      {"copied_bytes", &Counters::copied_bytes}, {"unsharded_bytes", &Counters::unsharded_bytes},
      {"unshards", &Counters::unshards},         {"allocations", &Counters::allocations}};
  std::cout << words << " {";
  const char* comma = "";
  for (const auto& [name, member] : names) {
    std::cout << comma << "\"" << name << "\": " << after.*member - before.*member;
    comma = ", ";
  }
  std::cout << "}" << std::endl;
}
