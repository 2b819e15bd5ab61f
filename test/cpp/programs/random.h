#pragma once

#include <cstdint>
#include <random>
#include <vector>

namespace shardwise::test {

/// Random numbers that are the same on every machine for the same seed.
class Random {
 public:
  explicit Random(uint64_t seed) : engine_(seed) {}

  /// 0 to n - 1.
  int below(int n) {
    return static_cast<int>(engine_() % static_cast<uint64_t>(n));
  }
  int between(int low, int high) {
    return low + below(high - low + 1);
  }
  bool chance(int percent) {
    return below(100) < percent;
  }
  uint64_t seed() {
    return engine_() >> 16;
  }
  template <typename T>
  const T& of(const std::vector<T>& choices) {
    return choices[static_cast<size_t>(below(static_cast<int>(choices.size())))];
  }

 private:
  std::mt19937_64 engine_;
};

/// A number below n that depends on all of the parts, and on nothing else.
inline int mixed(std::initializer_list<uint64_t> parts, int n) {
  uint64_t hash = 0x9e3779b97f4a7c15;
  for (const auto part : parts) {
    hash ^= part + 0x9e3779b97f4a7c15 + (hash << 6) + (hash >> 2);
    hash *= 0xff51afd7ed558ccd;
    hash ^= hash >> 33;
  }
  return static_cast<int>(hash % static_cast<uint64_t>(n));
}

} // namespace shardwise::test
