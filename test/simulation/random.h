// A small seeded generator whose numbers are the same everywhere (std distributions are not).
#pragma once

#include <cstdint>

namespace farandole::simulation {

/// splitmix64 (Steele, Lea, Flood, OOPSLA 2014, doi:10.1145/2660193.2660195).
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}
  uint64_t Next() {
    uint64_t z = state_ += 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
  }
  /// 0 <= result < n.
  int Below(int n) { return static_cast<int>(Next() % static_cast<uint64_t>(n)); }
  /// low <= result <= high.
  int Between(int low, int high) { return low + Below(high - low + 1); }
  bool Percent(int percent) { return Below(100) < percent; }

 private:
  uint64_t state_;
};

}  // namespace farandole::simulation
