// The only source of chance in a schedule: the same seed gives the same schedule on every machine.
#pragma once

#include <cstdint>

namespace ballast::sim {

// The finaliser of splitmix64 (Steele, Lea & Flood 2014).
inline uint64_t Mix(uint64_t x) {
  x += 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

template <typename... Rest>
uint64_t Mix(uint64_t first, uint64_t second, Rest... rest) {
  return Mix(Mix(first) ^ second, static_cast<uint64_t>(rest)...);
}

class Random {
 public:
  explicit Random(uint64_t seed) : state_(Mix(seed)) {}
  uint64_t Next() { return Mix(state_++); }
  uint64_t Below(uint64_t bound) { return (Next() >> 32) * bound >> 32; }
  bool Percent(uint64_t percent) { return Below(100) < percent; }

 private:
  uint64_t state_;
};

}  // namespace ballast::sim
